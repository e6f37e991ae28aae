// Package nvsentinel sends health events to NVSentinel. It speaks the protocol of its platform connector: one call of
// gRPC, the service PlatformConnector of data-models/protobufs/health_event.proto in
// https://github.com/NVIDIA/NVSentinel, transcribed here.
package nvsentinel

import (
	"fmt"
	"time"

	"google.golang.org/protobuf/encoding/protowire"
)

// Strategy selects what NVSentinel does with an event.
type Strategy int32

// Strategies, with the numbers of the protocol.
const (
	// Execute lets NVSentinel act: cordon, drain, remedy.
	Execute Strategy = 1
	// Store lets it only record the event.
	Store Strategy = 2
)

// ParseStrategy returns the strategy of NVSentinel's name for it.
func ParseStrategy(name string) (Strategy, error) {
	switch name {
	case "EXECUTE_REMEDIATION":
		return Execute, nil
	case "STORE_ONLY":
		return Store, nil
	}
	return 0, fmt.Errorf("%q is no processing strategy of NVSentinel: want EXECUTE_REMEDIATION or STORE_ONLY", name)
}

// Action is what NVSentinel is recommended to do.
type Action int32

// Actions, with the numbers of the protocol.
const (
	ActionNone           Action = 0
	ActionContactSupport Action = 5
)

// What every event of Evenkeel has. NVSentinel makes a node condition of the check's name, so it is none of our own
// conditions.
const (
	agent          = "evenkeel"
	componentClass = "Network"
	// CheckName is the name of the controller's events, ErrorCode the code of a fault.
	CheckName = "EvenkeelNetworkCheck"
	ErrorCode = "EVENKEEL_NETWORK_UNHEALTHY"
)

// Event is a health event about one node.
type Event struct {
	// Check names what was checked. A healthy event clears the fault of the same check and node.
	Check string
	Node  string
	// Healthy is false for a fault. A fatal fault is one of the node itself.
	Healthy, Fatal bool
	Action         Action
	// Message is the evidence: what was measured, and with which partners.
	Message string
	// ErrorCode is empty in healthy events.
	ErrorCode string
	// Details are further evidence, by name.
	Details  []Detail
	Time     time.Time
	Strategy Strategy
}

// Detail is an entry of an event's metadata.
type Detail struct{ Name, Value string }

// Numbers of the fields.
const (
	eventsVersion, eventsEvent protowire.Number = 1, 2

	eventVersion, eventAgent, eventComponentClass, eventCheckName           protowire.Number = 1, 2, 3, 4
	eventFatal, eventHealthy, eventMessage, eventAction                     protowire.Number = 5, 6, 7, 8
	eventErrorCode, eventEntities, eventMetadata, eventTime                 protowire.Number = 9, 10, 11, 12
	eventNode, eventStrategy                                                protowire.Number = 13, 16
	entityType, entityValue, entryKey, entryValue, stampSeconds, stampNanos protowire.Number = 1, 2, 1, 2, 1, 2
	protocolVersion                                                         uint64           = 1
)

// marshal encodes the events as the message HealthEvents.
func marshal(events []Event) []byte {
	out := appendNumber(nil, eventsVersion, protocolVersion)
	for _, e := range events {
		out = appendBytes(out, eventsEvent, e.marshal())
	}
	return out
}

func (e *Event) marshal() []byte {
	out := appendNumber(nil, eventVersion, protocolVersion)
	out = appendText(out, eventAgent, agent)
	out = appendText(out, eventComponentClass, componentClass)
	out = appendText(out, eventCheckName, e.Check)
	out = appendNumber(out, eventFatal, protowire.EncodeBool(e.Fatal))
	out = appendNumber(out, eventHealthy, protowire.EncodeBool(e.Healthy))
	out = appendText(out, eventMessage, e.Message)
	out = appendNumber(out, eventAction, uint64(e.Action))
	out = appendText(out, eventErrorCode, e.ErrorCode)
	out = appendBytes(out, eventEntities, appendText(appendText(nil, entityType, "Node"), entityValue, e.Node))
	for _, d := range e.Details {
		out = appendBytes(out, eventMetadata, appendText(appendText(nil, entryKey, d.Name), entryValue, d.Value))
	}
	stamp := appendNumber(nil, stampSeconds, uint64(e.Time.Unix()))
	out = appendBytes(out, eventTime, appendNumber(stamp, stampNanos, uint64(e.Time.Nanosecond())))
	out = appendText(out, eventNode, e.Node)
	return appendNumber(out, eventStrategy, uint64(e.Strategy))
}

// appendNumber appends a field, unless it has its default.
func appendNumber(out []byte, field protowire.Number, value uint64) []byte {
	if value == 0 {
		return out
	}
	return protowire.AppendVarint(protowire.AppendTag(out, field, protowire.VarintType), value)
}

func appendText(out []byte, field protowire.Number, value string) []byte {
	if value == "" {
		return out
	}
	return protowire.AppendString(protowire.AppendTag(out, field, protowire.BytesType), value)
}

func appendBytes(out []byte, field protowire.Number, value []byte) []byte {
	return protowire.AppendBytes(protowire.AppendTag(out, field, protowire.BytesType), value)
}
