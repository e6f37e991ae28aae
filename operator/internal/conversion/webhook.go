package conversion

import (
	"encoding/json"
	"fmt"
	"net/http"

	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	utiljson "k8s.io/apimachinery/pkg/util/json"
	"sigs.k8s.io/controller-runtime/pkg/log"
)

// maxRequest bounds a request, in bytes. The API server sends all objects of a list in one: this is a hundred checks of
// thousands of nodes each.
const maxRequest = 16 << 20

// Handler answers the API server's requests to convert objects, each a ConversionReview of apiextensions.k8s.io/v1. It
// converts one request at a time, as the decoded objects take several times the memory of their text.
func Handler() http.Handler {
	turn := make(chan struct{}, 1)
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		review := &apiextensionsv1.ConversionReview{}
		if err := json.NewDecoder(http.MaxBytesReader(w, r.Body, maxRequest)).Decode(review); err != nil {
			http.Error(w, fmt.Sprintf("want a ConversionReview of at most %d bytes: %v", maxRequest, err), http.StatusBadRequest)
			return
		}
		if review.Request == nil {
			http.Error(w, "the ConversionReview has no request", http.StatusBadRequest)
			return
		}
		select {
		case turn <- struct{}{}:
		case <-r.Context().Done():
			return
		}
		review.Response = answer(review.Request)
		<-turn
		review.Request = nil
		w.Header().Set("Content-Type", "application/json")
		if err := json.NewEncoder(w).Encode(review); err != nil {
			log.FromContext(r.Context()).Error(err, "the caller did not get its converted objects")
		}
	})
}

func answer(request *apiextensionsv1.ConversionRequest) *apiextensionsv1.ConversionResponse {
	response := &apiextensionsv1.ConversionResponse{UID: request.UID, Result: metav1.Status{Status: metav1.StatusSuccess}}
	for i, object := range request.Objects {
		raw, err := convertRaw(object.Raw, request.DesiredAPIVersion)
		if err != nil {
			response.ConvertedObjects = nil
			response.Result = metav1.Status{
				Status: metav1.StatusFailure, Message: fmt.Sprintf("object %d of %d: %v", i+1, len(request.Objects), err),
			}
			return response
		}
		response.ConvertedObjects = append(response.ConvertedObjects, runtime.RawExtension{Raw: raw})
	}
	return response
}

func convertRaw(raw []byte, apiVersion string) ([]byte, error) {
	var object map[string]any
	// It keeps whole numbers whole, as encoding/json does not.
	if err := utiljson.Unmarshal(raw, &object); err != nil {
		return nil, fmt.Errorf("it is no JSON object: %w", err)
	}
	if err := Convert(object, apiVersion); err != nil {
		return nil, err
	}
	return json.Marshal(object)
}
