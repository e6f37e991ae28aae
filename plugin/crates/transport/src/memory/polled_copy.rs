//! Copying into memory that its owner reads before it is told that the copy is complete.
//!
//! NCCL's kernels do not wait for `test` with its protocols LL and LL128: they poll the posted
//! buffer, and take data as soon as the flag beside it is right (`prims_ll.h`, `prims_ll128.h`). LL
//! has a flag in every 8 bytes. LL128 has one in the last 8 bytes of every line of 128 bytes.
//! `memcpy` keeps no order: glibc's stores the first bytes last, behind the flags of all lines.

use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

/// Bytes of a line of LL128. Lines begin at multiples of it, as NCCL's buffers do.
const LINE: usize = 128;
/// Bytes that are stored at once.
const WORD: usize = size_of::<u64>();
/// Offset of the flag in its line.
const FLAG: usize = LINE - WORD;

/// What is stored at an offset.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Store {
    /// A byte before the first or behind the last aligned word.
    Byte,
    /// An aligned word, at once: LL's data and its flag.
    Word,
    /// The last word of a line, behind all others of the line: LL128's flag.
    Flag,
}

/// Copies into memory that may be polled: ascending, by whole words where the memory is aligned,
/// the last word of each line behind the others of the line.
///
/// # Safety
/// `from` must be readable and `to` writable for `length` bytes. They must not overlap. Until the
/// function returns, others access the memory at `to` only by atomic loads, or not through Rust (as
/// a GPU).
pub(super) unsafe fn copy_to_polled(from: *const u8, to: *mut u8, length: usize) {
    for_each_store(to.addr(), length, |at, store| {
        // SAFETY: `for_each_store` gives places inside `length` bytes (tested below), for which the
        // caller vouches. A place of a word is a multiple of 8, as `AtomicU64` requires. No
        // reference but those to atomics exists, which allow others to read.
        unsafe {
            let (from, to) = (from.add(at), to.add(at));
            match store {
                Store::Byte => AtomicU8::from_ptr(to).store(from.read(), Ordering::Relaxed),
                Store::Word => {
                    let word = from.cast::<u64>().read_unaligned();
                    AtomicU64::from_ptr(to.cast()).store(word, Ordering::Relaxed);
                }
                Store::Flag => {
                    let word = from.cast::<u64>().read_unaligned();
                    AtomicU64::from_ptr(to.cast()).store(word, Ordering::Release);
                }
            }
        }
    });
}

/// Calls `store` for each place of a copy to `length` bytes at this address, in their order.
#[inline(always)]
fn for_each_store(address: usize, length: usize, mut store: impl FnMut(usize, Store)) {
    let before = address.next_multiple_of(WORD) - address;
    let mut at = before.min(length);
    (0..at).for_each(|at| store(at, Store::Byte));
    // The rest of the first line, whole lines, and the beginning of the last one.
    while length - at >= WORD {
        let in_line = (address + at) % LINE;
        if in_line == 0 && length - at >= LINE {
            (0..FLAG).step_by(WORD).for_each(|word| store(at + word, Store::Word));
            store(at + FLAG, Store::Flag);
            at += LINE;
        } else {
            store(at, if in_line == FLAG { Store::Flag } else { Store::Word });
            at += WORD;
        }
    }
    (at..length).for_each(|at| store(at, Store::Byte));
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;
    use std::thread;

    use super::*;
    use crate::memory::buffers::RecvBuffer;

    /// Every byte is stored once, in ascending order; aligned words at once, and flags as such.
    #[test]
    fn polled_copy_is_ascending_with_each_flag_last() {
        for address in [0, 1, 7, 8, 120, 121, 127, 4096, 4224] {
            for length in (0..300).chain([1024, 4096, 4097]) {
                let mut next = 0;
                for_each_store(address, length, |at, store| {
                    let place = format!("{store:?} at {address} + {at} of {length}");
                    assert_eq!(at, next, "{place}");
                    let (begin, end) =
                        (address.next_multiple_of(WORD), (address + length) & !(WORD - 1));
                    let expected = match address + at {
                        at if at < begin || at >= end => Store::Byte,
                        at if at % LINE == FLAG => Store::Flag,
                        _ => Store::Word,
                    };
                    assert_eq!(store, expected, "{place}");
                    next += if store == Store::Byte { 1 } else { WORD };
                });
                assert_eq!(next, length);
            }
        }
    }

    #[test]
    fn polled_copy_copies_exactly() {
        let source: Vec<u8> = (0..1000).map(|at| (at % 251) as u8 + 1).collect();
        for (from, to, length) in
            [(0, 0, 0), (3, 5, 1), (1, 0, 700), (0, 3, 701), (5, 8, 120), (0, 9, 900)]
        {
            let mut target = vec![0; 1000];
            // SAFETY: both are long enough, and the target is borrowed mutably.
            unsafe { copy_to_polled(source[from..].as_ptr(), target[to..].as_mut_ptr(), length) };
            assert_eq!(target[to..to + length], source[from..from + length]);
            assert!(target[..to].iter().chain(&target[to + length..]).all(|byte| *byte == 0));
        }
    }

    #[repr(C, align(128))]
    struct Line([AtomicU64; LINE / WORD]);

    /// Another thread polls the lines, as a GPU does, while they are copied again and again.
    #[test]
    fn polled_copy_lets_no_flag_be_seen_before_its_data() {
        const ROUNDS: u64 = 20_000;
        for lines in [8, 15] {
            let memory: Vec<Line> =
                (0..lines).map(|_| Line([const { AtomicU64::new(0) }; LINE / WORD])).collect();
            let start = memory.as_ptr().cast_mut().cast();
            // SAFETY: the memory outlives the copies, and is read by atomic loads only.
            let buffer = unsafe { RecvBuffer::new(start, lines * LINE) };
            let seen = AtomicU64::new(0);
            let wrong = AtomicBool::new(false);
            thread::scope(|scope| {
                scope.spawn(|| {
                    for round in 1..=ROUNDS {
                        for line in &memory {
                            let flag = &line.0[FLAG / WORD];
                            for polls in 1.. {
                                if flag.load(Ordering::Acquire) == round {
                                    break;
                                }
                                // The other thread may have to run on this processor.
                                if polls % 1000 == 0 {
                                    thread::yield_now();
                                }
                            }
                            let data = line.0[..FLAG / WORD].iter();
                            let right = data
                                .map(|word| word.load(Ordering::Relaxed))
                                .all(|word| word == round);
                            wrong.fetch_or(!right, Ordering::Relaxed);
                        }
                        seen.store(round, Ordering::Release);
                    }
                });
                for round in 1..=ROUNDS {
                    let message = round.to_ne_bytes().repeat(lines * LINE / WORD);
                    buffer.copy_from(&message);
                    for polls in 1.. {
                        if seen.load(Ordering::Acquire) == round {
                            break;
                        }
                        if polls % 1000 == 0 {
                            thread::yield_now();
                        }
                    }
                }
            });
            assert!(!wrong.into_inner(), "of {lines} lines, one had its flag before its data");
        }
    }
}
