package main

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

const resultPages = "../../../docs/results"

func TestIdleCostsAreReadFromTheirPages(t *testing.T) {
	table, err := idleCosts(resultPages)
	if err != nil {
		t.Fatal(err)
	}
	if len(table.Rows) != len(costRows) {
		t.Errorf("%d rows, want %d", len(table.Rows), len(costRows))
	}
	for _, cells := range table.Rows {
		if slices.Contains(cells[:4], "") || cells[3] == "no" && cells[4] == "" {
			t.Errorf("an empty cell in %q", cells)
		}
	}
}

func TestIdleCostsMissOfARowIsAnError(t *testing.T) {
	for _, row := range costRows {
		folder := t.TempDir()
		for _, name := range []string{"scale.md", "rdma.md"} {
			text, err := os.ReadFile(filepath.Join(resultPages, name))
			if err != nil {
				t.Fatal(err)
			}
			if name == row.page {
				text = []byte(strings.ReplaceAll(string(text), "| "+row.goal, "| another"))
			}
			if err := os.WriteFile(filepath.Join(folder, name), text, 0o644); err != nil {
				t.Fatal(err)
			}
		}
		if _, err := idleCosts(folder); err == nil || !strings.Contains(err.Error(), row.page) || !strings.Contains(err.Error(), row.goal) {
			t.Errorf("without the row %q of %s: %v", row.goal, row.page, err)
		}
	}
	if _, err := idleCosts(t.TempDir()); err == nil {
		t.Error("no error without pages")
	}
}
