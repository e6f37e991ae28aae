// Package nvsentineltest is the server's side of NVSentinel's platform connector, for tests: a gRPC server that decodes events with
// protobuf's own library, by a schema with the names and numbers of data-models/protobufs/health_event.proto of NVSentinel.
package nvsentineltest

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protodesc"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"
	"google.golang.org/protobuf/types/descriptorpb"
	"google.golang.org/protobuf/types/dynamicpb"
	"google.golang.org/protobuf/types/known/emptypb"
	"google.golang.org/protobuf/types/known/timestamppb"
)

// A Call is one call of HealthEventOccurredV1.
type Call struct {
	// Key and Authorization are the headers idempotency-key and authorization.
	Key, Authorization string
	Events             []Event
}

// Event is an event as the server reads it.
type Event struct {
	Version                                             int
	Agent, ComponentClass, CheckName, Message, NodeName string
	IsFatal, IsHealthy                                  bool
	RecommendedAction, ProcessingStrategy               string
	ErrorCode                                           []string
	EntitiesImpacted                                    []struct{ EntityType, EntityValue string }
	Metadata                                            map[string]string
	GeneratedTimestamp                                  string
}

// Server is a platform connector.
type Server struct {
	mu      sync.Mutex
	calls   []Call
	refusal error
	refused int
}

// Start serves on a socket until the test ends, and returns its target.
func Start(t *testing.T) (*Server, string) {
	t.Helper()
	folder, err := os.MkdirTemp("", "nvsentinel-") // of a test's own folder the name may be too long for a socket
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(folder); err != nil {
			t.Error(err)
		}
	})
	path := filepath.Join(folder, "nvsentinel.sock")
	listener, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	return serve(t, listener), "unix://" + path
}

// StartTLS serves on a port of this host with the certificate until the test ends, and returns its target.
func StartTLS(t *testing.T, certificate tls.Certificate) (*Server, string) {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	return serve(t, listener, grpc.Creds(credentials.NewServerTLSFromCert(&certificate))), listener.Addr().String()
}

func serve(t *testing.T, listener net.Listener, options ...grpc.ServerOption) *Server {
	t.Helper()
	s := &Server{}
	schema, err := schema()
	if err != nil {
		t.Fatal(err)
	}
	server := grpc.NewServer(options...)
	server.RegisterService(&grpc.ServiceDesc{
		ServiceName: "datamodels.PlatformConnector", HandlerType: (*any)(nil),
		Methods: []grpc.MethodDesc{{MethodName: "HealthEventOccurredV1", Handler: func(_ any, ctx context.Context, decode func(any) error, _ grpc.UnaryServerInterceptor) (any, error) {
			return s.occurred(ctx, schema, decode)
		}}},
	}, s)
	ended := make(chan error, 1)
	go func() { ended <- server.Serve(listener) }()
	t.Cleanup(func() {
		server.Stop()
		// A test that ends at once may stop it before it serves.
		if err := <-ended; err != nil && !errors.Is(err, grpc.ErrServerStopped) {
			t.Errorf("the platform connector: %v", err)
		}
	})
	return s
}

// Refuse makes later calls fail with the code; OK makes them succeed.
func (s *Server) Refuse(code codes.Code, why string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.refusal = status.Error(code, why)
}

// Refused is how many calls were refused.
func (s *Server) Refused() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.refused
}

// Calls are the calls that succeeded.
func (s *Server) Calls() []Call {
	s.mu.Lock()
	defer s.mu.Unlock()
	return append([]Call(nil), s.calls...)
}

func (s *Server) occurred(ctx context.Context, schema protoreflect.MessageDescriptor, decode func(any) error) (any, error) {
	message := dynamicpb.NewMessage(schema)
	if err := decode(message); err != nil {
		return nil, err
	}
	text, err := protojson.MarshalOptions{EmitUnpopulated: true}.Marshal(message)
	if err != nil {
		return nil, err
	}
	if len(message.GetUnknown()) > 0 {
		return nil, status.Error(codes.InvalidArgument, "unknown fields")
	}
	var read struct {
		Version int
		Events  []Event
	}
	if err := json.Unmarshal(text, &read); err != nil {
		return nil, err
	}
	if read.Version != 1 || len(read.Events) == 0 {
		return nil, status.Errorf(codes.InvalidArgument, "version %d, %d events", read.Version, len(read.Events))
	}
	headers, _ := metadata.FromIncomingContext(ctx)
	first := func(name string) string {
		if values := headers.Get(name); len(values) == 1 {
			return values[0]
		}
		return ""
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.refusal != nil {
		s.refused++
		return nil, s.refusal
	}
	s.calls = append(s.calls, Call{Key: first("idempotency-key"), Authorization: first("authorization"), Events: read.Events})
	return &emptypb.Empty{}, nil
}

// A field is a field of the schema. Its type is a scalar's, or the name of a message or enum of the schema.
type field struct {
	name     string
	number   int32
	kind     descriptorpb.FieldDescriptorProto_Type
	of       string
	repeated bool
}

// schema describes the message HealthEvents.
func schema() (protoreflect.MessageDescriptor, error) {
	const (
		text, number, yes = descriptorpb.FieldDescriptorProto_TYPE_STRING, descriptorpb.FieldDescriptorProto_TYPE_UINT32, descriptorpb.FieldDescriptorProto_TYPE_BOOL
		message, enum     = descriptorpb.FieldDescriptorProto_TYPE_MESSAGE, descriptorpb.FieldDescriptorProto_TYPE_ENUM
	)
	event := newMessage("HealthEvent",
		field{name: "version", number: 1, kind: number}, field{name: "agent", number: 2, kind: text}, field{name: "componentClass", number: 3, kind: text},
		field{name: "checkName", number: 4, kind: text}, field{name: "isFatal", number: 5, kind: yes}, field{name: "isHealthy", number: 6, kind: yes},
		field{name: "message", number: 7, kind: text}, field{name: "recommendedAction", number: 8, kind: enum, of: "RecommendedAction"},
		field{name: "errorCode", number: 9, kind: text, repeated: true}, field{name: "entitiesImpacted", number: 10, kind: message, of: "Entity", repeated: true},
		field{name: "metadata", number: 11, kind: message, of: "HealthEvent.MetadataEntry", repeated: true},
		field{name: "generatedTimestamp", number: 12, kind: message, of: ".google.protobuf.Timestamp"}, field{name: "nodeName", number: 13, kind: text},
		field{name: "processingStrategy", number: 16, kind: enum, of: "ProcessingStrategy"})
	entry := newMessage("MetadataEntry", field{name: "key", number: 1, kind: text}, field{name: "value", number: 2, kind: text})
	entry.Options = &descriptorpb.MessageOptions{MapEntry: proto.Bool(true)}
	event.NestedType = []*descriptorpb.DescriptorProto{entry}
	file, err := protodesc.NewFile(&descriptorpb.FileDescriptorProto{
		Name: proto.String("health_event.proto"), Package: proto.String("datamodels"), Syntax: proto.String("proto3"),
		Dependency: []string{timestamppb.File_google_protobuf_timestamp_proto.Path()},
		MessageType: []*descriptorpb.DescriptorProto{
			newMessage("HealthEvents", field{name: "version", number: 1, kind: number}, field{name: "events", number: 2, kind: message, of: "HealthEvent", repeated: true}),
			newMessage("Entity", field{name: "entityType", number: 1, kind: text}, field{name: "entityValue", number: 2, kind: text}),
			event,
		},
		EnumType: []*descriptorpb.EnumDescriptorProto{
			newEnum("RecommendedAction", "NONE", 0, "CONTACT_SUPPORT", 5), newEnum("ProcessingStrategy", "UNSPECIFIED", 0, "EXECUTE_REMEDIATION", 1, "STORE_ONLY", 2),
		},
	}, protoregistry.GlobalFiles)
	if err != nil {
		return nil, fmt.Errorf("the schema: %w", err)
	}
	return file.Messages().ByName("HealthEvents"), nil
}

func newMessage(name string, fields ...field) *descriptorpb.DescriptorProto {
	m := &descriptorpb.DescriptorProto{Name: proto.String(name)}
	for _, f := range fields {
		label := descriptorpb.FieldDescriptorProto_LABEL_OPTIONAL
		if f.repeated {
			label = descriptorpb.FieldDescriptorProto_LABEL_REPEATED
		}
		d := &descriptorpb.FieldDescriptorProto{Name: proto.String(f.name), JsonName: proto.String(f.name), Number: proto.Int32(f.number), Type: f.kind.Enum(), Label: label.Enum()}
		if f.of != "" {
			full := f.of
			if full[0] != '.' {
				full = ".datamodels." + full
			}
			d.TypeName = proto.String(full)
		}
		m.Field = append(m.Field, d)
	}
	return m
}

func newEnum(name string, values ...any) *descriptorpb.EnumDescriptorProto {
	e := &descriptorpb.EnumDescriptorProto{Name: proto.String(name)}
	for i := 0; i < len(values); i += 2 {
		e.Value = append(e.Value, &descriptorpb.EnumValueDescriptorProto{Name: proto.String(values[i].(string)), Number: proto.Int32(int32(values[i+1].(int)))})
	}
	return e
}
