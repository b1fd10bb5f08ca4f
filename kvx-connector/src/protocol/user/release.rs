//! Releases that wait for their answer: they outlive their requests.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use kvx_core::id::Incarnation;

use super::flow::Shared;
use super::{Output, Route};
use crate::protocol::id::{LeaseName, Reader};
use crate::protocol::message::{Release, ToOwner};
use crate::protocol::terms::Ranks;

type Key = (Incarnation, LeaseName, Reader);

/// Bounded in count and in how often each is sent.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct Releases {
    waiting: BTreeMap<Key, Waiting>,
    due: BTreeSet<(Duration, Key)>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Waiting {
    set: Ranks,
    sent: u8,
    /// `None`: its peer cannot be reached at present.
    due: Option<Duration>,
}

impl Releases {
    /// Sends a release, as soon as its peer can be reached, until it is answered.
    pub(super) fn begin(
        &mut self,
        now: Duration,
        key: Key,
        set: Ranks,
        ready: bool,
        shared: &mut Shared,
    ) {
        if self.waiting.len() >= shared.config.max_releases {
            shared.counts.releases_lost += 1;
            return;
        }
        let due = ready.then_some(now);
        self.due.extend(due.map(|due| (due, key)));
        self.waiting.insert(key, Waiting { set, sent: 0, due });
    }

    pub(super) fn lapse(&mut self, now: Duration, shared: &mut Shared, out: &mut Vec<Output>) {
        while let Some((at, key)) = self.due.first().copied()
            && at <= now
        {
            self.due.pop_first();
            let Some(waiting) = self.waiting.get_mut(&key) else { continue };
            if waiting.sent >= shared.config.release_tries {
                self.waiting.remove(&key);
                shared.counts.releases_lost += 1;
                continue;
            }
            waiting.sent += 1;
            let next = now + shared.again(waiting.sent.into());
            waiting.due = Some(next);
            self.due.insert((next, key));
            let (peer, lease, reader) = key;
            let message = ToOwner::Release(Release { lease, reader, set: waiting.set.clone() });
            out.push(Output::Send { peer, message, route: Route::Control });
        }
    }

    /// It was answered; whether it waited for that.
    pub(super) fn answered(&mut self, peer: Incarnation, lease: LeaseName, reader: Reader) -> bool {
        let key = (peer, lease, reader);
        let waiting = self.waiting.remove(&key);
        let due = waiting.as_ref().and_then(|waiting| waiting.due);
        if let Some(due) = due {
            self.due.remove(&(due, key));
        }
        waiting.is_some()
    }

    fn of(&self, peer: Incarnation) -> Vec<Key> {
        let first = (peer, FIRST, READER);
        let of = self.waiting.range(first..).take_while(|((other, ..), _)| *other == peer);
        of.map(|(key, _)| *key).collect()
    }

    pub(super) fn has(&self, peer: Incarnation) -> bool {
        self.waiting
            .range((peer, FIRST, READER)..)
            .next()
            .is_some_and(|((other, ..), _)| *other == peer)
    }

    /// A peer can be reached.
    pub(super) fn reached(&mut self, now: Duration, peer: Incarnation) {
        self.set(peer, Some(now));
    }

    /// A peer cannot be reached at present.
    pub(super) fn unreached(&mut self, peer: Incarnation) {
        self.set(peer, None);
    }

    fn set(&mut self, peer: Incarnation, to: Option<Duration>) {
        for key in self.of(peer) {
            if let Some(waiting) = self.waiting.get_mut(&key) {
                if let Some(due) = std::mem::replace(&mut waiting.due, to) {
                    self.due.remove(&(due, key));
                }
                self.due.extend(to.map(|due| (due, key)));
            }
        }
    }

    /// A peer is gone, or cannot be had; how many releases are lost.
    pub(super) fn forget(&mut self, peer: Incarnation) -> u64 {
        let keys = self.of(peer);
        for (_, lease, reader) in &keys {
            self.answered(peer, *lease, *reader);
        }
        keys.len() as u64
    }

    pub(super) fn wake(&self) -> Option<Duration> {
        self.due.first().map(|(at, _)| *at)
    }

    pub(super) fn len(&self) -> usize {
        self.waiting.len()
    }
}

/// What is sorted before every lease and every reader.
const FIRST: LeaseName = LeaseName { owner: Incarnation::from_bytes([0; 16]), number: 0, epoch: 0 };
const READER: Reader = Reader {
    attempt: crate::protocol::id::Attempt { user: Incarnation::from_bytes([0; 16]), number: 0 },
    rank: 0,
};
