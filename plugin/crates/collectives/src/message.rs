//! Messages from one rank to another, outside of collective operations.

use std::cell::RefCell;
use std::sync::Arc;
use std::time::Duration;

use crate::error::Result;
use crate::link::Key;
use crate::memory::Target;
use crate::mesh::{Mesh, Receipt, Trouble};
use crate::pulse::Failure;
use crate::wait::Wait;

/// A receive on its way. Dropping it takes the memory back.
struct Receive<'a> {
    mesh: &'a Mesh,
    from: usize,
    receipt: Arc<Receipt>,
}

impl Receive<'_> {
    /// Whether a link had to be ended for it.
    fn take_back(&self) -> bool {
        self.receipt.done().is_none() && self.mesh.abandon_receive(self.from, &self.receipt)
    }
}

impl Drop for Receive<'_> {
    fn drop(&mut self) {
        self.take_back();
    }
}

/// Which message is waited for.
pub(crate) struct Wanted<'a> {
    pub(crate) mesh: &'a Mesh,
    /// From one of these.
    pub(crate) from: &'a [usize],
    pub(crate) key: Key,
    pub(crate) timeout: Duration,
}

impl Wanted<'_> {
    /// Receives it. From whom, as a place among those named, and how many bytes.
    pub(crate) fn receive(&self, into: &mut [u8]) -> Result<(usize, usize)> {
        let Self { mesh, key, timeout, from } = *self;
        let mut wait = Wait::new(mesh, "receive", key.tag, timeout)?;
        let place = match from {
            [_] => 0,
            _ => self.find(&mut wait)?,
        };
        let whom = from[place];
        // SAFETY: the receive takes the memory back when it is dropped, which is before the borrow ends; it is not forgotten.
        let into = unsafe { Target::lend(into) };
        let receive = Receive { mesh, from: whom, receipt: mesh.receive(whom, key, into) };
        let look = |receipt: &Receipt| -> std::result::Result<(bool, Option<usize>), Trouble> {
            if let Some(bytes) = receipt.done() {
                return Ok((true, Some(bytes)));
            }
            let moved = mesh.progress(whom, receipt)?;
            Ok((moved, receipt.done()))
        };
        let result = loop {
            match look(&receive.receipt) {
                Err(trouble) => break Err(wait.trouble(trouble)),
                Ok((_, Some(bytes))) => break Ok(bytes),
                Ok((true, None)) => wait.moved(),
                Ok((false, None)) => {
                    let mut found = None;
                    let waited = wait.idle(|| vec![whom], &mut || match look(&receive.receipt) {
                        Ok((false, None)) => false,
                        other => {
                            found = Some(other);
                            true
                        }
                    });
                    match found {
                        Some(Err(trouble)) => break Err(wait.trouble(trouble)),
                        Some(Ok(_)) => wait.moved(),
                        None => {
                            if let Err(error) = waited {
                                break Err(error);
                            }
                        }
                    }
                }
            }
        };
        let broken = receive.take_back();
        let bytes = result.map_err(|error| {
            if broken && error.is_group_usable() {
                let (kind, ranks) = (error.kind(), error.ranks().to_vec());
                let failure = Failure { kind, ranks, text: error.to_string() };
                return mesh.pulse().fail(failure).error();
            }
            error
        })?;
        Ok((place, bytes))
    }

    /// Who sends it first. Ranks that have left do not matter as long as others may send.
    fn find(&self, wait: &mut Wait<'_>) -> Result<usize> {
        let Self { mesh, key, from, timeout } = *self;
        let there = RefCell::new(vec![true; from.len()]);
        let look = || -> std::result::Result<Option<usize>, Trouble> {
            let mut there = there.borrow_mut();
            let mut trouble = None;
            for (place, rank) in from.iter().enumerate() {
                if !there[place] {
                    continue;
                }
                match mesh.probe(*rank, key) {
                    Ok(true) => return Ok(Some(place)),
                    Ok(false) => {}
                    Err(other) => trouble = Some((place, other)),
                }
            }
            let Some((place, trouble)) = trouble else { return Ok(None) };
            there[place] = trouble.mismatch || !mesh.has_left(trouble.rank, timeout / 5);
            if there[place] || !there.contains(&true) { Err(trouble) } else { Ok(None) }
        };
        let ranks = || {
            let there = there.borrow();
            from.iter().zip(&*there).filter(|(_, there)| **there).map(|(rank, _)| *rank).collect()
        };
        loop {
            match look() {
                Err(trouble) => return Err(wait.trouble(trouble)),
                Ok(Some(place)) => return Ok(place),
                Ok(None) => {
                    let mut found = None;
                    let waited = wait.idle(ranks, &mut || match look() {
                        Ok(None) => false,
                        other => {
                            found = Some(other);
                            true
                        }
                    });
                    match found {
                        Some(Err(trouble)) => return Err(wait.trouble(trouble)),
                        Some(Ok(Some(place))) => return Ok(place),
                        _ => waited?,
                    }
                }
            }
        }
    }
}
