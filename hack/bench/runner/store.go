package runner

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"evenkeel.dev/evenkeel/hack/bench/experiment"
)

// A Store keeps samples in a file of JSON lines, one for each run.
type Store struct {
	Samples []experiment.Sample
	path    string
}

// OpenStore reads a file of samples, which may not exist yet. A last line that an interruption has torn is dropped.
func OpenStore(path string) (*Store, error) {
	s := &Store{path: path}
	text, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return s, nil
	} else if err != nil {
		return nil, fmt.Errorf("samples: %w", err)
	}
	lines := bytes.SplitAfter(text, []byte("\n"))
	for i, line := range lines {
		if len(line) == 0 {
			continue // after the last line's end
		}
		var sample experiment.Sample
		err := json.Unmarshal(line, &sample)
		torn := err != nil || !bytes.HasSuffix(line, []byte("\n"))
		last := i == len(lines)-1 || i == len(lines)-2 && len(lines[i+1]) == 0
		switch {
		case torn && last:
			return s, s.Rewrite(s.Samples)
		case torn:
			return nil, fmt.Errorf("samples: %s, line %d is no sample: %w: remove the line, or the file to measure anew", path, i+1, err)
		}
		s.Samples = append(s.Samples, sample)
	}
	return s, nil
}

// Append adds a sample to the file.
func (s *Store) Append(sample experiment.Sample) error {
	line, err := encode(sample)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(s.path), 0o755); err != nil {
		return fmt.Errorf("samples: %w", err)
	}
	file, err := os.OpenFile(s.path, os.O_WRONLY|os.O_APPEND|os.O_CREATE, 0o644)
	if err != nil {
		return fmt.Errorf("samples: %w", err)
	}
	_, err = file.Write(line)
	if err := errors.Join(err, file.Close()); err != nil {
		return fmt.Errorf("samples: %w", err)
	}
	s.Samples = append(s.Samples, sample)
	return nil
}

// Rewrite replaces all samples.
func (s *Store) Rewrite(samples []experiment.Sample) error {
	var text []byte
	for _, sample := range samples {
		line, err := encode(sample)
		if err != nil {
			return err
		}
		text = append(text, line...)
	}
	err := os.WriteFile(s.path+".new", text, 0o644)
	if err == nil {
		err = os.Rename(s.path+".new", s.path)
	}
	if err != nil {
		return fmt.Errorf("samples: %w", err)
	}
	s.Samples = samples
	return nil
}

func encode(sample experiment.Sample) ([]byte, error) {
	line, err := json.Marshal(sample)
	if err != nil {
		return nil, fmt.Errorf("sample of %s, %s: %w", sample.Case, sample.Contender, err)
	}
	return append(line, '\n'), nil
}
