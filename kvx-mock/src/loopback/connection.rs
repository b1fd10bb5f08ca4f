//! A connection, and what each end of it posts to the other.

use std::sync::atomic::{AtomicBool, AtomicU32};
use std::sync::{Arc, Mutex, OnceLock, Weak};

use kvx_core::id::{Incarnation, PeerId};

use super::engine::Engine;
use super::lock;
use crate::error::down;
use crate::net::ConnectionId;

/// A connection of two engines, the smaller incarnation first.
///
/// Once it is over both lanes are closed, and that comes before either side is told: so a side that has polled *peer down*
/// is neither read nor written any more, and nothing of the peer comes after it.
pub(super) struct Connection {
    pub(super) number: ConnectionId,
    pub(super) ends: [End; 2],
}

/// One engine's end of a connection.
pub(super) struct End {
    pub(super) incarnation: Incarnation,
    pub(super) engine: Weak<Engine>,
    /// This engine's handle of the other, once a handshake has given it one.
    pub(super) peer: OnceLock<PeerId>,
    /// Whether the handshake allows posting.
    pub(super) ready: AtomicBool,
    /// Transfers whose settled event was not polled.
    pub(super) in_flight: AtomicU32,
    /// Held while this end moves bytes.
    pub(super) lane: Mutex<Lane>,
}

/// Whether an end may post.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Lane {
    Open,
    Closed,
}

impl Connection {
    pub(super) fn new(number: ConnectionId, one: &Arc<Engine>, other: &Arc<Engine>) -> Self {
        let (first, second) =
            if one.incarnation < other.incarnation { (one, other) } else { (other, one) };
        let end = |engine: &Arc<Engine>| End {
            incarnation: engine.incarnation,
            engine: Arc::downgrade(engine),
            peer: OnceLock::new(),
            ready: AtomicBool::new(false),
            in_flight: AtomicU32::new(0),
            lane: Mutex::new(Lane::Open),
        };
        Self { number, ends: [end(first), end(second)] }
    }

    pub(super) const fn pair(&self) -> (Incarnation, Incarnation) {
        (self.ends[0].incarnation, self.ends[1].incarnation)
    }

    /// The number of this engine's end.
    pub(super) fn end_of(&self, me: Incarnation) -> usize {
        usize::from(self.ends[0].incarnation != me)
    }

    /// Ends it, from the side of `me`: why, for this side (`None`: because it wanted to) and for the other. The second time
    /// does nothing. The hub is locked, so that no handshake joins meanwhile.
    pub(super) fn end(&self, me: Incarnation, mine: Option<&'static str>, theirs: &'static str) {
        for end in &self.ends {
            if std::mem::replace(&mut *lock(&end.lane), Lane::Closed) == Lane::Closed {
                return;
            }
        }
        for end in &self.ends {
            let reason = if end.incarnation == me { mine } else { Some(theirs) };
            if let (Some(peer), Some(engine)) = (end.peer.get(), end.engine.upgrade()) {
                engine.inbox.down(*peer, reason.map(|reason| down("connection", reason)));
            }
        }
    }
}
