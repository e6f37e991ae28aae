package results

import _ "embed" // the script

// PythonScript runs the tests of a folder and writes events to file descriptor 3.
//
//go:embed unittest_events.py
var PythonScript string
