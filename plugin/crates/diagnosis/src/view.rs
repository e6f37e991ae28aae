//! A process's view of its connections, and its encoding.

/// Maximum number of connections in a view.
pub const MAX_CONNECTIONS: usize = 24;
/// Maximum encoded length of a view, in bytes, so that it fits into one packet.
pub const MAX_VIEW_BYTES: usize = 1200;

/// Version of the encoding.
const VERSION: u8 = 3;
const MAX_NAME: usize = 63;
const MAX_DEVICES: usize = 8;
/// `rank` of a process that has none.
const NO_RANK: u32 = u32::MAX;
const FLAG_SEND: u8 = 1;

/// A process's identity.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Process {
    /// Random, chosen when the process starts.
    pub id: u64,
    /// Its rank in the job, from the environment; `None` without one.
    pub rank: Option<u32>,
    /// The name of its host or node.
    pub host: String,
    /// The UID of its pod; empty outside Kubernetes.
    pub pod: String,
}

/// What a process saw since its last view.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct View {
    /// The process that reports.
    pub process: Process,
    /// Sequence number of the process's views.
    pub sequence: u32,
    /// The time that the view covers, in milliseconds. All times below are in milliseconds within
    /// it unless noted.
    pub window: u32,
    /// Time in which no connection of the process had a request.
    pub uncalled: u32,
    /// Time since the last request, which may exceed the window; 0 if there are requests.
    pub uncalled_for: u32,
    /// Scheduling delay of the plugin's own thread.
    pub starved: u32,
    /// Number of the process's open connections.
    pub connections_open: u32,
    /// Names of the devices that connections refer to by index.
    pub devices: Vec<String>,
    /// The connections chosen by [`select_connections`], at most [`MAX_CONNECTIONS`].
    pub connections: Vec<ConnectionView>,
}

/// What one end of a connection saw. Times are in milliseconds.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ConnectionView {
    /// Identifier, the same at both ends.
    pub id: u64,
    /// Whether this end sends.
    pub is_sender: bool,
    /// Index of the device.
    pub device: u8,
    /// Time with unfinished requests.
    pub outstanding: u32,
    /// Part of `outstanding`: a sender lacked a receive buffer, or a receiver had not got a
    /// message's first bytes.
    pub peer: u32,
    /// Part of `outstanding`: bytes were under way.
    pub wire: u32,
    /// Time in which a receiver had bytes but no buffer for them.
    pub unposted: u32,
    /// For a sender: time in which bytes were unacknowledged although the peer's window was open; 0
    /// if not measured.
    pub unacknowledged: u32,
    /// Age of the oldest unfinished request, which may exceed the window; 0 if there is none.
    pub outstanding_for: u32,
    /// Bytes moved, in KiB.
    pub kibibytes: u32,
    /// The largest smoothed round trip of a flow, in microseconds; 0 if not measured.
    pub round_trip: u32,
    /// Retransmitted segments.
    pub retransmits: u16,
    /// Whether a flow's last segments got no answer although they were sent several times.
    pub is_unanswered: bool,
}

/// Chooses the connections of a view if there are more than fit. Half are the ones that wait
/// longest per byte, which a verdict may name. The other half rotates through the rest, for
/// comparison. `turn` keeps the position of the rotation from view to view.
pub fn select_connections<T>(
    mut all: Vec<(ConnectionView, T)>,
    turn: &mut usize,
) -> Vec<(ConnectionView, T)> {
    if all.len() <= MAX_CONNECTIONS {
        return all;
    }
    let waits = |view: &ConnectionView| {
        f64::from(view.outstanding.max(view.unposted)) / (f64::from(view.kibibytes) + 1.0)
    };
    all.sort_by(|(one, _), (other, _)| waits(other).total_cmp(&waits(one)));
    let mut others = all.split_off(MAX_CONNECTIONS / 2);
    others.sort_by_key(|(view, _)| view.id);
    let first = *turn % others.len();
    others.rotate_left(first);
    others.truncate(MAX_CONNECTIONS - all.len());
    *turn = first + others.len();
    all.extend(others);
    all
}

/// The reason why bytes are not a view.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not a view: {0}")]
pub struct ViewError(&'static str);

const TOO_LARGE: ViewError = ViewError("a number that is too large");

impl View {
    /// Encodes the view, at most [`MAX_VIEW_BYTES`]. Long names are cut, and entries beyond the
    /// limits are left out.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = vec![VERSION];
        out.extend(self.process.id.to_le_bytes());
        out.extend(self.process.rank.unwrap_or(NO_RANK).to_le_bytes());
        put_name(&mut out, &self.process.host);
        put_name(&mut out, &self.process.pod);
        for number in [
            self.sequence,
            self.window,
            self.uncalled,
            self.uncalled_for,
            self.starved,
            self.connections_open,
        ] {
            out.extend(number.to_le_bytes());
        }
        let devices = &self.devices[..self.devices.len().min(MAX_DEVICES)];
        out.push(devices.len() as u8);
        devices.iter().for_each(|name| put_short_name(&mut out, name));
        let count = out.len();
        out.push(0);
        for (number, connection) in self.connections.iter().take(MAX_CONNECTIONS).enumerate() {
            let before = out.len();
            connection.encode(&mut out);
            if out.len() > MAX_VIEW_BYTES {
                out.truncate(before);
                break;
            }
            out[count] = number as u8 + 1;
        }
        out
    }

    /// Decodes the output of [`View::encode`]. The input is untrusted.
    ///
    /// # Errors
    /// [`ViewError`] when the bytes are not a view of this version.
    pub fn decode(bytes: &[u8]) -> Result<Self, ViewError> {
        let mut rest = Reader(bytes);
        if rest.u8()? != VERSION {
            return Err(ViewError("of another version"));
        }
        let id = rest.u64()?;
        let rank = Some(rest.u32()?).filter(|rank| *rank != NO_RANK);
        let process = Process { id, rank, host: rest.name()?, pod: rest.name()? };
        let mut view = Self {
            process,
            sequence: rest.u32()?,
            window: rest.u32()?,
            uncalled: rest.u32()?,
            uncalled_for: rest.u32()?,
            starved: rest.u32()?,
            connections_open: rest.u32()?,
            devices: Vec::new(),
            connections: Vec::new(),
        };
        let devices = usize::from(rest.u8()?);
        if devices > MAX_DEVICES {
            return Err(ViewError("too many devices"));
        }
        for _ in 0..devices {
            view.devices.push(rest.name()?);
        }
        let connections = usize::from(rest.u8()?);
        if connections > MAX_CONNECTIONS {
            return Err(ViewError("too many connections"));
        }
        for _ in 0..connections {
            view.connections.push(ConnectionView::decode(&mut rest)?);
        }
        if rest.0.is_empty() { Ok(view) } else { Err(ViewError("bytes behind its end")) }
    }
}

impl ConnectionView {
    fn encode(&self, out: &mut Vec<u8>) {
        out.extend(self.id.to_le_bytes());
        out.push(u8::from(self.is_sender) * FLAG_SEND + u8::from(self.is_unanswered) * 2);
        out.push(self.device);
        for number in [
            self.outstanding,
            self.peer,
            self.wire,
            self.unposted,
            self.unacknowledged,
            self.outstanding_for,
            self.kibibytes,
            self.round_trip,
            self.retransmits.into(),
        ] {
            put_number(out, number);
        }
    }

    fn decode(rest: &mut Reader<'_>) -> Result<Self, ViewError> {
        let id = rest.u64()?;
        let flags = rest.u8()?;
        Ok(Self {
            id,
            is_sender: flags & FLAG_SEND != 0,
            is_unanswered: flags & 2 != 0,
            device: rest.u8()?,
            outstanding: rest.number()?,
            peer: rest.number()?,
            wire: rest.number()?,
            unposted: rest.number()?,
            unacknowledged: rest.number()?,
            outstanding_for: rest.number()?,
            kibibytes: rest.number()?,
            round_trip: rest.number()?,
            retransmits: u16::try_from(rest.number()?).map_err(|_| TOO_LARGE)?,
        })
    }
}

/// Writes a number in LEB128, because most are small: seven bits per byte, the lowest first.
fn put_number(out: &mut Vec<u8>, mut number: u32) {
    while number >= 0x80 {
        out.push(number as u8 | 0x80);
        number >>= 7;
    }
    out.push(number as u8);
}

/// Writes a name, cut to the maximum length. Characters other than printable ASCII become question
/// marks.
fn put_name(out: &mut Vec<u8>, name: &str) {
    put_cut(out, name, MAX_NAME);
}

/// As [`put_name`], for names as short as those of interfaces.
fn put_short_name(out: &mut Vec<u8>, name: &str) {
    put_cut(out, name, 23);
}

fn put_cut(out: &mut Vec<u8>, name: &str, most: usize) {
    let name = clean(name, most);
    out.push(name.len() as u8);
    out.extend(name.into_bytes());
}

/// The name as a receiver decodes it.
pub(crate) fn clean_name(name: &str) -> String {
    clean(name, MAX_NAME)
}

fn clean(name: &str, most: usize) -> String {
    name.chars().take(most).map(|c| char::from(printable(c))).collect()
}

fn printable(c: char) -> u8 {
    if c.is_ascii_graphic() && !matches!(c, '"' | '\\' | '<' | '>' | '&') { c as u8 } else { b'?' }
}

struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn array<const N: usize>(&mut self) -> Result<[u8; N], ViewError> {
        let (first, rest) = self.0.split_first_chunk().ok_or(ViewError("too short"))?;
        self.0 = rest;
        Ok(*first)
    }

    fn u8(&mut self) -> Result<u8, ViewError> {
        Ok(u8::from_le_bytes(self.array()?))
    }

    fn u32(&mut self) -> Result<u32, ViewError> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    fn u64(&mut self) -> Result<u64, ViewError> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    /// Reads the output of [`put_number`].
    fn number(&mut self) -> Result<u32, ViewError> {
        let mut number = 0_u64;
        for shift in (0..u32::BITS).step_by(7) {
            let byte = self.u8()?;
            number |= u64::from(byte & 0x7f) << shift;
            if byte < 0x80 {
                return u32::try_from(number).map_err(|_| TOO_LARGE);
            }
        }
        Err(TOO_LARGE)
    }

    fn name(&mut self) -> Result<String, ViewError> {
        let length = usize::from(self.u8()?);
        let (name, rest) = self.0.split_at_checked(length).ok_or(ViewError("too short"))?;
        self.0 = rest;
        if length > MAX_NAME || name.iter().any(|byte| printable((*byte).into()) != *byte) {
            return Err(ViewError("a name that is no name"));
        }
        Ok(name.iter().map(|byte| char::from(*byte)).collect())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on fails there")]
mod tests {
    use super::*;
    use evenkeel_testkit::TestRng;

    fn view() -> View {
        let process = Process { id: 7, rank: Some(3), host: "n3".into(), pod: "uid-1".into() };
        let connection = |id| ConnectionView {
            id,
            is_sender: id % 2 == 0,
            device: 1,
            outstanding: 1000,
            peer: 400,
            wire: 600,
            unposted: 3,
            unacknowledged: 500,
            outstanding_for: 70_000,
            kibibytes: 5 << 20,
            round_trip: 250,
            retransmits: 9,
            is_unanswered: id % 3 == 0,
        };
        View {
            process,
            sequence: 5,
            window: 1000,
            uncalled: 20,
            uncalled_for: 0,
            starved: 1,
            connections_open: 40,
            devices: vec!["eth0".into(), "eth1".into()],
            connections: (0..MAX_CONNECTIONS as u64).map(connection).collect(),
        }
    }

    #[test]
    fn view_is_read_as_it_was_written() {
        let full = view();
        assert_eq!(View::decode(&full.encode()), Ok(full.clone()));
        let nobody = View { process: Process::default(), ..full };
        assert_eq!(View::decode(&nobody.encode()), Ok(nobody));
    }

    #[test]
    fn numbers_of_a_connection_are_read_as_they_were_written() {
        let of = |number: u32| ConnectionView {
            outstanding: number,
            outstanding_for: number,
            round_trip: number,
            retransmits: number as u16,
            ..ConnectionView::default()
        };
        let ends = (0..=32).map(|bit| ((1_u64 << bit) - 1) as u32);
        for number in ends.flat_map(|end| [end, end.wrapping_add(1)]) {
            let mut bytes = Vec::new();
            of(number).encode(&mut bytes);
            assert_eq!(ConnectionView::decode(&mut Reader(&bytes)), Ok(of(number)));
        }
        for bytes in [&[0xff, 0xff, 0xff, 0xff, 0x1f][..], &[0x80; 6]] {
            assert_eq!(Reader(bytes).number(), Err(TOO_LARGE), "{bytes:?}");
        }
        let no_end = ViewError("too short");
        assert_eq!(Reader(&[0x80, 0x80]).number(), Err(no_end));
    }

    /// All wait for all of the time. One carries little, and is in each view; the others are in one
    /// of each few.
    #[test]
    fn slowest_connections_are_in_each_view_and_others_in_turn() {
        let mut turn = 0;
        let mut seen = std::collections::BTreeMap::new();
        for _ in 0..10 {
            let all = (0..62).map(|id| ConnectionView {
                id,
                outstanding: 1000,
                kibibytes: if id == 40 { 100 } else { 5000 },
                ..ConnectionView::default()
            });
            let shown = select_connections(all.map(|view| (view, ())).collect(), &mut turn);
            assert_eq!(shown.len(), MAX_CONNECTIONS);
            shown.iter().for_each(|(view, ())| *seen.entry(view.id).or_insert(0) += 1);
        }
        assert_eq!(seen.remove(&40), Some(10));
        assert_eq!(seen.len(), 61, "{seen:?}");
    }

    #[test]
    fn view_fits_into_a_packet_whatever_its_names() {
        let mut long = view();
        long.process.host = "\u{e9}<x>".repeat(100);
        long.process.pod = "p".repeat(1000);
        long.devices = vec!["d".repeat(99); 99];
        long.connections.extend(view().connections);
        for connection in &mut long.connections {
            (connection.outstanding_for, connection.kibibytes) = (u32::MAX, u32::MAX);
            (connection.wire, connection.round_trip) = (u32::MAX, u32::MAX);
        }
        let bytes = long.encode();
        assert!(bytes.len() <= MAX_VIEW_BYTES, "{}", bytes.len());
        let read = View::decode(&bytes).unwrap();
        assert!((18..MAX_CONNECTIONS).contains(&read.connections.len()), "those that fit");
        assert!(read.process.host.starts_with("??x???x?"), "{}", read.process.host);
    }

    #[test]
    fn view_decodes_any_bytes_without_panic() {
        let mut rng = TestRng::new(3);
        let mut refused = 0;
        for _ in 0..20_000 {
            let mut bytes = view().encode();
            (0..=rng.below(4)).for_each(|_| rng.mutate(&mut bytes));
            refused += usize::from(View::decode(&bytes).is_err());
        }
        assert!(refused > 100, "{refused}");
    }
}
