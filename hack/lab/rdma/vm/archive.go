package vm

import (
	"bytes"
	"fmt"
)

// An archive is an unfinished initramfs: cpio in the "newc" format, which
// the kernel's documentation describes as initramfs buffer format.
type archive struct {
	data  bytes.Buffer
	inode int
}

const (
	modeFolder  = 0o040755
	modeProgram = 0o100755
)

func (a *archive) folder(name string)               { a.entry(name, modeFolder, nil) }
func (a *archive) file(name string, content []byte) { a.entry(name, modeProgram, content) }

// bytes ends the archive and returns it.
func (a *archive) bytes() []byte {
	a.inode = -1 // the closing entry has no inode and no mode
	a.entry("TRAILER!!!", 0, nil)
	return a.data.Bytes()
}

func (a *archive) entry(name string, mode int, content []byte) {
	a.inode++
	fmt.Fprintf(&a.data, "070701%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x",
		a.inode, mode, 0, 0, 1, 0, len(content), 0, 0, 0, 0, len(name)+1, 0)
	a.data.WriteString(name)
	a.data.WriteByte(0)
	a.pad()
	a.data.Write(content)
	a.pad()
}

// pad fills up to the next multiple of four bytes.
func (a *archive) pad() {
	for a.data.Len()%4 != 0 {
		a.data.WriteByte(0)
	}
}
