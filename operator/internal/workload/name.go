package workload

import (
	"crypto/sha256"
	"encoding/hex"
	"strings"

	"k8s.io/apimachinery/pkg/types"
)

// maxStem is the part of the job's name that fits before "-reduce-" and eight digits: a StatefulSet's name has at most 52
// characters.
const maxStem = 36

// ObjectName returns the name of an object that is made for a job that is being created, by the job's name, the object's use and the
// UID of the request. So a job that is deleted and created again at once meets none of the objects of the one before.
func ObjectName(job, use string, creation types.UID) string {
	job = strings.ReplaceAll(job, ".", "-")
	if job == "" || job[0] < 'a' {
		job = "j" + job // host names begin with a letter
	}
	sum := sha256.Sum256([]byte(creation))
	return strings.TrimRight(job[:min(len(job), maxStem)], "-") + "-" + use + "-" + hex.EncodeToString(sum[:4])
}
