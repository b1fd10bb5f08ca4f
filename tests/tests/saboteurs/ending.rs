//! Cancelling, severing, revoking, closing.

use std::collections::BTreeSet;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::SeqCst};

use kvx_core::Result;
use kvx_core::backend::{Event, Events, Outcome, Submit};
use kvx_core::id::{PeerId, TransferId};

use crate::tools::{InFlight, Later, Own, Peers, Queue, lock, notes_peers, settled, without_own};
use crate::wrapper::{At, Closing, Post, Sabotage};

/// What `cancel` does wrong.
pub(crate) struct Cancels {
    how: Cancel,
    own: Own,
    in_flight: InFlight,
    cancelled: Mutex<BTreeSet<(usize, TransferId)>>,
    later: Later,
    queue: Queue,
}

#[derive(Clone, Copy)]
pub(crate) enum Cancel {
    NeverSettles,
    CalledDone,
    ThenWritten,
    NothingAccepted,
    TakesAll,
}

impl Cancels {
    pub(crate) fn new(how: Cancel) -> Self {
        Self {
            how,
            own: Own::default(),
            in_flight: InFlight::default(),
            cancelled: Mutex::default(),
            later: Later::default(),
            queue: Queue::default(),
        }
    }
}

impl Sabotage for Cancels {
    fn submit(&self, at: &At, post: Post<'_>) -> Result<Submit> {
        self.in_flight.submit(at, post)
    }

    fn cancel(&self, at: &At, id: TransferId) -> Result<()> {
        lock(&self.cancelled).insert((at.index, id));
        match self.how {
            Cancel::NothingAccepted => {
                let _ = at.backend.cancel(id);
                return Ok(());
            }
            Cancel::TakesAll => {
                for held in self.in_flight.list(at, |held| held.id != id) {
                    let _ = at.backend.cancel(held.id);
                }
            }
            _ => {}
        }
        at.backend.cancel(id)
    }

    fn poll(&self, at: &At, events: &mut Events) {
        self.later.poll(at);
        self.queue.give(at, events, |event| {
            let Event::Settled { id, outcome } = event else { return vec![event] };
            let held = self.in_flight.remove(at, id);
            let cancelled = lock(&self.cancelled).remove(&(at.index, id));
            match (self.how, &outcome, held) {
                (Cancel::NeverSettles, ..) if cancelled => return Vec::new(),
                (Cancel::CalledDone, Outcome::Cancelled, _) => {
                    return vec![settled(id, Outcome::done())];
                }
                (Cancel::ThenWritten, Outcome::Cancelled, Some(mut held)) => {
                    held.id = self.own.next();
                    self.later.hold(at, 30, held);
                }
                _ => {}
            }
            without_own(settled(id, outcome))
        });
    }
}

/// What `sever` does wrong.
pub(crate) struct Severs {
    how: Sever,
    peers: Peers,
    in_flight: InFlight,
    /// Transfers and peers of which nothing is said any more.
    silent: Mutex<BTreeSet<(usize, TransferId)>>,
    silent_peers: Mutex<BTreeSet<(usize, PeerId)>>,
    /// Peers that will really be severed after some polls.
    waiting: Mutex<Vec<(usize, u32, PeerId)>>,
    queue: Queue,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Sever {
    NeverSettles,
    DownMissing,
    DownFirst,
    DownTwice,
    GoesOn,
    StaleAccepted,
    UnknownAccepted,
    TakesAll,
}

impl Severs {
    pub(crate) fn new(how: Sever) -> Self {
        Self {
            how,
            peers: Peers::default(),
            in_flight: InFlight::default(),
            silent: Mutex::default(),
            silent_peers: Mutex::default(),
            waiting: Mutex::default(),
            queue: Queue::default(),
        }
    }

    fn silence(&self, at: &At, peer: PeerId) {
        lock(&self.silent_peers).insert((at.index, peer));
    }

    /// Tells the caller that all is over, and goes on.
    fn go_on(&self, at: &At, peer: PeerId) {
        for held in self.in_flight.list(at, |held| held.peer == peer) {
            lock(&self.silent).insert((at.index, held.id));
            self.queue.push(at, settled(held.id, Outcome::Cancelled));
        }
        self.queue.push(at, Event::PeerDown { peer, error: None });
        self.silence(at, peer);
        lock(&self.waiting).push((at.index, 200, peer));
    }
}

impl Sabotage for Severs {
    notes_peers!();

    fn submit(&self, at: &At, post: Post<'_>) -> Result<Submit> {
        self.in_flight.submit(at, post)
    }

    fn sever(&self, at: &At, peer: PeerId) -> Result<()> {
        match self.how {
            Sever::NeverSettles => {
                at.backend.sever(peer)?;
                let left = self.in_flight.list(at, |held| held.peer == peer);
                lock(&self.silent).extend(left.iter().map(|held| (at.index, held.id)));
                self.silence(at, peer);
                Ok(())
            }
            Sever::DownFirst => {
                at.backend.sever(peer)?;
                self.queue.push(at, Event::PeerDown { peer, error: None });
                self.silence(at, peer);
                Ok(())
            }
            Sever::GoesOn => {
                at.backend.peer_info(peer)?;
                self.go_on(at, peer);
                Ok(())
            }
            Sever::StaleAccepted if self.peers.of(at).contains(&peer) => {
                let _ = at.backend.sever(peer);
                Ok(())
            }
            Sever::UnknownAccepted => {
                let _ = at.backend.sever(peer);
                Ok(())
            }
            Sever::TakesAll => {
                for other in self.peers.of(at) {
                    let _ = at.backend.sever(other);
                }
                Ok(())
            }
            _ => at.backend.sever(peer),
        }
    }

    fn poll(&self, at: &At, events: &mut Events) {
        lock(&self.waiting).retain_mut(|(index, polls, peer)| {
            if *index == at.index {
                *polls -= 1;
                if *polls == 0 {
                    let _ = at.backend.sever(*peer);
                }
            }
            *polls > 0
        });
        self.queue.give(at, events, |event| match event {
            Event::Settled { id, .. } => {
                self.in_flight.remove(at, id);
                let silent = lock(&self.silent).contains(&(at.index, id));
                if silent { Vec::new() } else { vec![event] }
            }
            Event::PeerDown { peer, .. } => {
                let silent = lock(&self.silent_peers).contains(&(at.index, peer));
                match self.how {
                    Sever::DownMissing => Vec::new(),
                    Sever::DownTwice => vec![Event::PeerDown { peer, error: None }, event],
                    _ if silent => Vec::new(),
                    _ => vec![event],
                }
            }
            other => vec![other],
        });
    }
}

/// What `revoke` does wrong.
pub(crate) struct Revokes {
    how: Revoked,
    peers: Peers,
    waiting: Mutex<Vec<(usize, u32, PeerId)>>,
}

#[derive(Clone, Copy)]
pub(crate) enum Revoked {
    Late,
    Never,
    All,
}

impl Revokes {
    pub(crate) fn new(how: Revoked) -> Self {
        Self { how, peers: Peers::default(), waiting: Mutex::default() }
    }
}

impl Sabotage for Revokes {
    notes_peers!();

    fn revoke(&self, at: &At, peer: PeerId) -> Result<()> {
        match self.how {
            Revoked::Late => lock(&self.waiting).push((at.index, 100, peer)),
            Revoked::Never => {}
            Revoked::All => {
                for peer in self.peers.of(at) {
                    at.backend.revoke(peer)?;
                }
            }
        }
        Ok(())
    }

    fn poll(&self, at: &At, events: &mut Events) {
        lock(&self.waiting).retain_mut(|(index, polls, peer)| {
            if *index == at.index {
                *polls -= 1;
                if *polls == 0 {
                    let _ = at.backend.revoke(*peer);
                }
            }
            *polls > 0
        });
        at.backend.poll(events);
    }
}

/// What `close` does wrong.
pub(crate) struct Closes {
    how: Close,
    count: AtomicU32,
    closed: AtomicBool,
    queue: Queue,
}

#[derive(Clone, Copy)]
pub(crate) enum Close {
    Hangs,
    Forgets,
    FailsTwice,
    Nothing,
}

impl Closes {
    pub(crate) fn new(how: Close) -> Self {
        let (count, closed) = (AtomicU32::new(0), AtomicBool::new(false));
        Self { how, count, closed, queue: Queue::default() }
    }
}

impl Sabotage for Closes {
    fn closing(&self, _: &At) -> Closing {
        self.closed.store(true, SeqCst);
        match self.how {
            Close::Hangs => Closing::Hang,
            Close::Nothing => Closing::Nothing,
            Close::FailsTwice if self.count.fetch_add(1, SeqCst) > 0 => Closing::Fail,
            _ => Closing::Honest,
        }
    }

    fn poll(&self, at: &At, events: &mut Events) {
        let forgets = matches!(self.how, Close::Forgets) && self.closed.load(SeqCst);
        self.queue.give(at, events, |event| match event {
            Event::Settled { .. } if forgets => Vec::new(),
            other => vec![other],
        });
    }
}
