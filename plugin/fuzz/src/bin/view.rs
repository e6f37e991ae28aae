//! What a process sees of its connections. Without a job key, anybody may send one.
#![no_main]

use evenkeel_diagnosis::{ConnectionView, MAX_CONNECTIONS, MAX_VIEW_BYTES, Process, View};
use evenkeel_fuzz::{fuzz_target, within, write_seeds};

fn seeds() -> Vec<Vec<u8>> {
    let process = Process { id: 7, rank: Some(3), host: "n3".into(), pod: "uid-1".into() };
    let connection = |id| ConnectionView {
        id,
        is_sender: id % 2 == 0,
        outstanding: 1000,
        wire: 600,
        kibibytes: 5 << 20,
        is_unanswered: id % 3 == 0,
        ..ConnectionView::default()
    };
    let view = |connections: u64| View {
        process: process.clone(),
        sequence: 5,
        window: 1000,
        devices: vec!["eth0".into(), "eth1".into()],
        connections: (0..connections).map(connection).collect(),
        ..View::default()
    };
    vec![View::default().encode(), view(2).encode(), view(MAX_CONNECTIONS as u64).encode()]
}

fuzz_target!(init: write_seeds(seeds()), |input: &[u8]| {
    let Ok(view) = within(16 << 10, || View::decode(input)) else { return };
    assert!(view.connections.len() <= MAX_CONNECTIONS);
    let names = [&view.process.host, &view.process.pod];
    for name in names.into_iter().chain(&view.devices) {
        // Names become parts of JSON, metrics, SVG and log lines.
        assert!(name.bytes().all(|byte| byte.is_ascii_graphic() && !b"\"\\<>&".contains(&byte)));
    }
    let again = view.encode();
    assert!(again.len() <= MAX_VIEW_BYTES);
    // Long names of devices are cut, bits of flags that have no meaning are not kept, and nothing
    // else changes.
    let decoded = View::decode(&again).expect("a view that was encoded");
    assert_eq!(decoded.encode(), again);
    if again.len() == input.len() {
        assert_eq!(decoded, view);
    }
});
