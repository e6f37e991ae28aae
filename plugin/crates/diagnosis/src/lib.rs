//! Which rank, card or path the ranks of a job wait for.
//!
//! Each process of a job sees how long it waits on each of its connections, and whether for the
//! peer or for the wire ([`View`]). One process, the *collector* ([`election`]), gets the views of
//! all ([`Collector`]), and [`judge()`] finds what the waits come from. Waits propagate: in a ring,
//! every rank waits for the one before it. So the function follows the waits until it finds a
//! process that waits for nobody and has not called, or a connection whose bytes take too long.
//!
//! Nothing here uses sockets or clocks: time is a parameter.

mod collector;
pub mod election;
mod found;
mod job;
mod judge;
mod late;
mod median;
mod slow;
mod timeline;
mod verdict;
mod view;
mod waits;

pub use collector::Collector;
pub use job::{Job, Link, Member};
pub use judge::judge;
pub use timeline::Timeline;
pub use verdict::{Class, Direction, MAX_JSON, Outcome, Place, Suspect, Verdict};
pub use view::{
    ConnectionView, MAX_CONNECTIONS, MAX_VIEW_BYTES, Process, View, ViewError, select_connections,
};
