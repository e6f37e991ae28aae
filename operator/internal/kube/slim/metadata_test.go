package slim

import (
	"reflect"
	"strconv"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

func labelled(values map[string]string) *metav1.ObjectMeta {
	return &metav1.ObjectMeta{Name: "p", Labels: values}
}

func sameMap(a, b map[string]string) bool {
	return reflect.ValueOf(a).Pointer() == reflect.ValueOf(b).Pointer()
}

// The objects of a first list are reduced twice. Nothing is made again the second time, though the first is long forgotten.
func TestSlimMetadataReducedTwiceIsKept(t *testing.T) {
	m := NewMetadata([]string{"a", "b"}, nil)
	once := m.Of(labelled(map[string]string{"a": "1", "other": "2"}))
	for i := range 2 * maxPooled {
		if v := strconv.Itoa(i); m.Of(labelled(map[string]string{"b": v, "other": "2"})).Labels["b"] != v {
			t.Fatalf("%s is kept as something else", v)
		}
	}
	if twice := m.Of(&once); !sameMap(once.Labels, twice.Labels) || twice.Labels["a"] != "1" || len(twice.Labels) != 1 {
		t.Errorf("%v was made again: %v", once.Labels, twice.Labels)
	}
}

// Values that look alike when they are written one after the other are told apart.
func TestSlimMetadataTellsValuesApart(t *testing.T) {
	m := NewMetadata([]string{"a", "b", "c"}, nil)
	all := []map[string]string{{"a": "1"}, {"b": "1"}, {"a": `1"="2`}, {"a": "1", "b": "2"}, {"a": "", "b": "1"}, {"a": "1 ", "c": ""}, {"a": "1", "c": ""}}
	for range 2 {
		for _, values := range all {
			if got := m.Of(labelled(values)).Labels; !reflect.DeepEqual(got, values) {
				t.Errorf("%v is kept as %v", values, got)
			}
		}
	}
}
