//! Encoding of numbers and byte strings in the messages that ranks exchange outside of operations.

/// Appends bytes, preceded by their length.
pub(crate) fn put(out: &mut Vec<u8>, bytes: &[u8]) {
    out.extend_from_slice(&(bytes.len() as u32).to_le_bytes());
    out.extend_from_slice(bytes);
}

/// Appends a list of numbers, preceded by its length.
pub(crate) fn put_list<'a>(out: &mut Vec<u8>, numbers: impl ExactSizeIterator<Item = &'a usize>) {
    out.extend_from_slice(&(numbers.len() as u32).to_le_bytes());
    for number in numbers {
        out.extend_from_slice(&(*number as u32).to_le_bytes());
    }
}

/// Reads encoded values. Every call returns `None` when the bytes are too short.
pub(crate) struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    pub(crate) fn new(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }

    fn take(&mut self, length: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(length)?;
        self.0 = rest;
        Some(taken)
    }

    pub(crate) fn byte(&mut self) -> Option<u8> {
        self.take(1).map(|bytes| bytes[0])
    }

    pub(crate) fn word(&mut self) -> Option<u32> {
        self.take(4)?.try_into().ok().map(u32::from_le_bytes)
    }

    pub(crate) fn long(&mut self) -> Option<u64> {
        self.take(8)?.try_into().ok().map(u64::from_le_bytes)
    }

    /// The bytes that [`put`] wrote.
    pub(crate) fn bytes(&mut self) -> Option<&'a [u8]> {
        let length = self.word()? as usize;
        self.take(length)
    }

    /// The list that [`put_list`] wrote.
    pub(crate) fn list(&mut self) -> Option<Vec<usize>> {
        let length = self.word()? as usize;
        let numbers = self.take(length.checked_mul(4)?)?;
        let (numbers, _) = numbers.as_chunks::<4>();
        Some(numbers.iter().map(|number| u32::from_le_bytes(*number) as usize).collect())
    }
}

/// The FNV-1a digest of 64 bits (Fowler, Noll, Vo): ranks derive the same identifiers without a message.
pub(crate) fn digest(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |digest, byte| {
        (digest ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn encoded_values_decode_unless_truncated() {
        let mut out = vec![7];
        out.extend_from_slice(&9u64.to_le_bytes());
        put(&mut out, b"host");
        put_list(&mut out, [1, 70_000].iter());
        for length in 0..=out.len() {
            let mut reader = Reader::new(&out[..length]);
            let read =
                (|| Some((reader.byte()?, reader.long()?, reader.bytes()?, reader.list()?)))();
            let all = (7, 9, &b"host"[..], vec![1, 70_000]);
            assert_eq!(read, (length == out.len()).then_some(all));
        }
    }

    #[test]
    fn impossible_length_is_refused() {
        assert_eq!(Reader::new(&u32::MAX.to_le_bytes()).list(), None);
        assert_eq!(Reader::new(&u32::MAX.to_le_bytes()).bytes(), None);
    }
}
