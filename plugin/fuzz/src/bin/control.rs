//! The control connection of RDMA: control messages in a stream, and the acknowledgements of those
//! that are replayed.
#![no_main]

use evenkeel_fuzz::{fuzz_target, within, write_seeds};
use evenkeel_protocol::{
    ControlMessage, MAX_ADDRESSES, MAX_PARTS_IN_FLIGHT, MAX_PORTS, MAX_QUEUE_PAIRS, MessagePart,
    PacketMarking, PortInfo, QueuePairInfo, ReplayBuffer, WINDOW,
};

/// Maximum length of a message.
const MAX_BYTES: usize = 8 + 8 + MAX_PARTS_IN_FLIGHT * 12;

fn messages() -> Vec<ControlMessage> {
    let pair = QueuePairInfo { number: 17, sequence: 0xab_cdef };
    let parts =
        (0..MAX_PARTS_IN_FLIGHT as u32).map(|index| MessagePart { message: 1 << 40, index });
    let port = PortInfo {
        gid: [7; 16],
        lid: 3,
        mtu: 5,
        eager: true,
        address: 0x7fff_0000_1000,
        key: 99,
        marking: PacketMarking { traffic_class: 0xff, service_level: 15 },
    };
    vec![
        ControlMessage::Ports(1, vec![port]),
        ControlMessage::Ports(MAX_PORTS as u8, vec![port; MAX_PORTS]),
        ControlMessage::Offer(7, pair, vec![]),
        ControlMessage::Offer(0, pair, parts.collect()),
        ControlMessage::Answer(1, pair, u64::MAX),
        ControlMessage::Ready(0),
        ControlMessage::QueuePairFailed(3),
        ControlMessage::CreditRequest(9, 1 << 30),
        ControlMessage::Close(2),
        ControlMessage::Tag(-5),
        ControlMessage::TagsDifferFrom(1 << 40),
        ControlMessage::SameTagBelow(1 << 50, vec![]),
        ControlMessage::SameTagBelow(64, (0..WINDOW as u32).collect()),
        ControlMessage::AlternateAddresses(vec![[10, 1, 2, 3].into(), [0xfd; 16].into()]),
        ControlMessage::Ack(1),
    ]
}

fn seeds() -> Vec<Vec<u8>> {
    let mut seeds: Vec<_> = messages().iter().map(ControlMessage::encode).collect();
    seeds.push(seeds.concat());
    seeds
}

fuzz_target!(init: write_seeds(seeds()), |input: &[u8]| {
    let mut rest = input;
    let mut replay = ReplayBuffer::default();
    let (mut kept, mut acked) = (0, 0);
    loop {
        let (message, used) = match within(2 * MAX_BYTES, || ControlMessage::decode(rest)) {
            Ok(Some(decoded)) => decoded,
            Ok(None) => {
                assert!(rest.len() < MAX_BYTES, "the rest of a message that is too long");
                break;
            }
            Err(_) => break,
        };
        assert_eq!(message.encode(), rest[..used]);
        assert!(used <= MAX_BYTES);
        // Not before all of it is there.
        assert_eq!(ControlMessage::decode(&rest[..used - 1]), Ok(None));
        match &message {
            ControlMessage::Offer(pair, _, parts) => {
                assert!(usize::from(*pair) < MAX_QUEUE_PAIRS && parts.len() <= MAX_PARTS_IN_FLIGHT);
            }
            ControlMessage::Answer(pair, ..)
            | ControlMessage::Ready(pair)
            | ControlMessage::QueuePairFailed(pair) => {
                assert!(usize::from(*pair) < MAX_QUEUE_PAIRS);
            }
            ControlMessage::SameTagBelow(_, lengths) => assert!(lengths.len() as u64 <= WINDOW),
            ControlMessage::AlternateAddresses(addresses) => {
                assert!((1..=MAX_ADDRESSES).contains(&addresses.len()));
            }
            ControlMessage::Ports(keys, ports) => {
                assert!((1..=MAX_PORTS).contains(&usize::from(*keys)));
                assert!((1..=MAX_PORTS).contains(&ports.len()));
                for port in ports {
                    let PacketMarking { service_level, .. } = port.marking;
                    assert!(service_level <= PacketMarking::MAX_SERVICE_LEVEL);
                }
            }
            ControlMessage::Ack(count) => {
                // The peer cannot have received more than was sent, nor less than before.
                let is_possible = (acked..=kept).contains(count);
                assert_eq!(replay.acked(*count), is_possible);
                acked = if is_possible { *count } else { acked };
                assert_eq!(replay.unacked().count() as u64, kept - acked);
            }
            _ => {}
        }
        if message.is_replayed() {
            replay.push(message.encode());
            kept += 1;
            let _ = replay.received();
        }
        rest = &rest[used..];
    }
});
