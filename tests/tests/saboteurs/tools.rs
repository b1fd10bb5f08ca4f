//! What faults are made of.

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::sync::{Mutex, MutexGuard, PoisonError};

use kvx_core::backend::{Event, Events, Outcome, Submit};
use kvx_core::id::{PeerId, TransferId};

use crate::wrapper::{At, Held, Post};

pub(crate) fn lock<T>(of: &Mutex<T>) -> MutexGuard<'_, T> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Events that wait for a side's poll.
#[derive(Default)]
pub(crate) struct Queue(Mutex<BTreeMap<usize, VecDeque<Event>>>);

impl Queue {
    pub(crate) fn push(&self, at: &At, event: Event) {
        lock(&self.0).entry(at.index).or_default().push_back(event);
    }

    /// Polls the honest backend, changes each event as `change` says, and gives as many as there is room for.
    pub(crate) fn give(
        &self,
        at: &At,
        events: &mut Events,
        mut change: impl FnMut(Event) -> Vec<Event>,
    ) {
        let mut fresh = Events::with_limit(events.room().max(1));
        at.backend.poll(&mut fresh);
        for event in fresh.drain() {
            for event in change(event) {
                self.push(at, event);
            }
        }
        self.drain(at, events);
    }

    /// Gives as many waiting events as there is room for, without polling the honest backend.
    pub(crate) fn drain(&self, at: &At, events: &mut Events) {
        let mut queues = lock(&self.0);
        let queue = queues.entry(at.index).or_default();
        while events.room() > 0
            && let Some(event) = queue.pop_front()
        {
            events.push(event);
        }
    }
}

pub(crate) fn settled(id: TransferId, outcome: Outcome) -> Event {
    Event::Settled { id, outcome }
}

/// Ids of transfers that only a saboteur knows of.
pub(crate) struct Own(AtomicU64);

const FIRST: u64 = 0x5ab0_0000_0000_0000;

impl Default for Own {
    fn default() -> Self {
        Self(AtomicU64::new(FIRST))
    }
}

impl Own {
    pub(crate) fn next(&self) -> TransferId {
        TransferId(self.0.fetch_add(1, SeqCst))
    }
}

/// An event, unless it is of a transfer that only a saboteur knows of.
pub(crate) fn without_own(event: Event) -> Vec<Event> {
    match &event {
        Event::Settled { id, .. } if (FIRST..FIRST + (1 << 32)).contains(&id.0) => Vec::new(),
        _ => vec![event],
    }
}

/// Posts that wait for a number of polls of their side.
#[derive(Default)]
pub(crate) struct Later(Mutex<Vec<(usize, u32, Held)>>);

impl Later {
    pub(crate) fn hold(&self, at: &At, polls: u32, post: Held) {
        lock(&self.0).push((at.index, polls, post));
    }

    /// Counts a poll, and posts what has waited long enough.
    pub(crate) fn poll(&self, at: &At) {
        let mut waiting = lock(&self.0);
        waiting.retain_mut(|(index, polls, post)| {
            if *index != at.index {
                return true;
            }
            *polls = polls.saturating_sub(1);
            *polls > 0 || !post.try_to(at)
        });
    }

    /// Takes all posts of the sides for which `which` holds.
    pub(crate) fn take(&self, which: impl Fn(usize) -> bool) -> Vec<(usize, Held)> {
        let mut waiting = lock(&self.0);
        let (taken, left) =
            std::mem::take(&mut *waiting).into_iter().partition(|(i, ..)| which(*i));
        *waiting = left;
        let taken: Vec<(usize, u32, Held)> = taken;
        taken.into_iter().map(|(index, _, post)| (index, post)).collect()
    }
}

/// What each side has in flight.
#[derive(Default)]
pub(crate) struct InFlight(Mutex<BTreeMap<(usize, TransferId), Held>>);

impl InFlight {
    pub(crate) fn submit(&self, at: &At, post: Post<'_>) -> kvx_core::Result<Submit> {
        let submitted = post.to(at)?;
        if submitted == Submit::Submitted {
            lock(&self.0).insert((at.index, post.id), post.held());
        }
        Ok(submitted)
    }

    pub(crate) fn remove(&self, at: &At, id: TransferId) -> Option<Held> {
        lock(&self.0).remove(&(at.index, id))
    }

    /// What a side has in flight for which `which` holds.
    pub(crate) fn list(&self, at: &At, which: impl Fn(&Held) -> bool) -> Vec<Held> {
        let all = lock(&self.0);
        all.iter()
            .filter(|((index, _), held)| *index == at.index && which(held))
            .map(|(_, held)| held.clone())
            .collect()
    }
}

/// The peers that each side has met, oldest first.
#[derive(Default)]
pub(crate) struct Peers(Mutex<Vec<(usize, PeerId)>>);

impl Peers {
    pub(crate) fn met(&self, at: &At, peer: PeerId) {
        let mut all = lock(&self.0);
        if !all.contains(&(at.index, peer)) {
            all.push((at.index, peer));
        }
    }

    pub(crate) fn of(&self, at: &At) -> Vec<PeerId> {
        lock(&self.0)
            .iter()
            .filter(|(index, _)| *index == at.index)
            .map(|(_, peer)| *peer)
            .collect()
    }

    /// Another peer of the side, if there is one.
    pub(crate) fn other(&self, at: &At, than: PeerId) -> Option<PeerId> {
        self.of(at).into_iter().find(|peer| *peer != than)
    }
}

/// The two methods in which a side meets a peer, with each peer noted in `self.peers`.
macro_rules! notes_peers {
    () => {
        fn accept(
            &self,
            at: &$crate::wrapper::At,
            offer: &kvx_core::handshake::HandshakeBytes,
        ) -> kvx_core::Result<(kvx_core::id::PeerId, kvx_core::handshake::HandshakeBytes)> {
            let met = at.backend.accept(offer)?;
            self.peers.met(at, met.0);
            Ok(met)
        }

        fn complete(
            &self,
            at: &$crate::wrapper::At,
            reply: &kvx_core::handshake::HandshakeBytes,
        ) -> kvx_core::Result<(kvx_core::id::PeerId, kvx_core::handshake::HandshakeBytes)> {
            let met = at.backend.complete(reply)?;
            self.peers.met(at, met.0);
            Ok(met)
        }
    };
}
pub(crate) use notes_peers;
