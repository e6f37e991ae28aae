// Package slimtest shows in tests what is left of an object.
package slimtest

import (
	"reflect"
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// maxDepth is the number of values within each other that Fill sets.
const maxDepth = 24

// Fill sets every exported field of the object, a pointer to a struct. Lists and maps get one element.
func Fill(object any) { fill(reflect.ValueOf(object).Elem(), 0) }

// Texts is a map with a value for each of the keys, and for another one.
func Texts(keys ...string) map[string]string {
	filled := map[string]string{"other": "text"}
	for _, key := range keys {
		filled[key] = "text"
	}
	return filled
}

func fill(v reflect.Value, depth int) {
	if depth > maxDepth {
		return
	}
	switch v.Interface().(type) {
	case metav1.Time:
		v.Set(reflect.ValueOf(metav1.NewTime(time.Unix(1<<30, 0))))
		return
	case resource.Quantity:
		v.Set(reflect.ValueOf(resource.MustParse("7")))
		return
	}
	switch v.Kind() {
	case reflect.Struct:
		for i := range v.NumField() {
			if v.Type().Field(i).IsExported() {
				fill(v.Field(i), depth+1)
			}
		}
	case reflect.Pointer:
		v.Set(reflect.New(v.Type().Elem()))
		fill(v.Elem(), depth+1)
	case reflect.Slice:
		v.Set(reflect.MakeSlice(v.Type(), 1, 1))
		fill(v.Index(0), depth+1)
	case reflect.Map:
		key, value := reflect.New(v.Type().Key()).Elem(), reflect.New(v.Type().Elem()).Elem()
		fill(key, depth+1)
		fill(value, depth+1)
		v.Set(reflect.MakeMap(v.Type()))
		v.SetMapIndex(key, value)
	case reflect.String:
		v.SetString("text")
	case reflect.Bool:
		v.SetBool(true)
	case reflect.Int, reflect.Int32, reflect.Int64:
		v.SetInt(1)
	case reflect.Uint8:
		v.SetUint(1)
	}
}

// Fields returns the paths of all fields of the object that are not empty, such as Spec.Containers[].Image or Labels[KEY], sorted.
func Fields(object any) []string {
	var found []string
	list(reflect.ValueOf(object).Elem(), "", &found)
	slices.Sort(found)
	return slices.Compact(found)
}

func list(v reflect.Value, path string, found *[]string) {
	if v.IsZero() {
		return
	}
	switch v.Interface().(type) {
	case metav1.Time, resource.Quantity:
		*found = append(*found, path)
		return
	}
	switch v.Kind() {
	case reflect.Struct:
		for i := range v.NumField() {
			field := v.Type().Field(i)
			switch {
			case !field.IsExported():
			case field.Anonymous:
				list(v.Field(i), path, found)
			case path == "":
				list(v.Field(i), field.Name, found)
			default:
				list(v.Field(i), path+"."+field.Name, found)
			}
		}
	case reflect.Pointer:
		list(v.Elem(), path, found)
	case reflect.Slice:
		for i := range v.Len() {
			list(v.Index(i), path+"[]", found)
		}
	case reflect.Map:
		for _, key := range v.MapKeys() {
			if v.Type().Elem().Kind() == reflect.String {
				*found = append(*found, path+"["+key.String()+"]")
				continue
			}
			list(v.MapIndex(key), path+"[]", found)
		}
	default:
		*found = append(*found, path)
	}
}
