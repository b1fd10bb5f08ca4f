//! Releases that wait for their answer: they outlive their requests.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use kvx_core::id::Incarnation;

use super::flow::Shared;
use super::{Output, Route};
use crate::protocol::id::{Fingerprint, LeaseName, Reader};
use crate::protocol::message::{Release, ToOwner};
use crate::protocol::terms::{Access, Ranks};

type Key = (Incarnation, LeaseName, Reader);

/// What whoever gives a lease up has done, or would have done, and to what.
type Does = (Access, Option<Fingerprint>);

/// Bounded in count and in how often each is sent.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct Releases {
    waiting: BTreeMap<Key, Waiting>,
    due: BTreeSet<(Duration, Key)>,
    /// When each is given up, answered or not.
    ends: BTreeSet<(Duration, Key)>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Waiting {
    set: Ranks,
    does: Does,
    sent: u8,
    /// `None`: its peer cannot be reached at present.
    due: Option<Duration>,
    until: Duration,
}

impl Releases {
    /// Sends a release, as soon as its peer can be reached, until it is answered.
    pub(super) fn begin(
        &mut self,
        now: Duration,
        key: Key,
        (set, does): (Ranks, Does),
        ready: bool,
        shared: &mut Shared,
    ) {
        if self.waiting.len() >= shared.config.max_releases {
            shared.counts.releases_lost += 1;
            return;
        }
        self.end(key);
        let (due, until) = (ready.then_some(now), now + shared.config.release_for);
        self.due.extend(due.map(|due| (due, key)));
        self.ends.insert((until, key));
        self.waiting.insert(key, Waiting { set, does, sent: 0, due, until });
    }

    pub(super) fn lapse(&mut self, now: Duration, shared: &mut Shared, out: &mut Vec<Output>) {
        while let Some((at, key)) = self.ends.first().copied()
            && at <= now
        {
            self.end(key);
            shared.counts.releases_lost += 1;
        }
        while let Some((at, key)) = self.due.first().copied()
            && at <= now
        {
            self.due.pop_first();
            let Some(waiting) = self.waiting.get_mut(&key) else { continue };
            if waiting.sent >= shared.config.release_tries {
                self.end(key);
                shared.counts.releases_lost += 1;
                continue;
            }
            waiting.sent += 1;
            let next = now + shared.again(waiting.sent.into());
            waiting.due = Some(next);
            self.due.insert((next, key));
            let (peer, lease, reader) = key;
            let (set, (access, fingerprint)) = (waiting.set.clone(), waiting.does);
            let access = Some(access);
            let message = ToOwner::Release(Release { lease, reader, set, access, fingerprint });
            out.push(Output::Send { peer, message, route: Route::Control });
        }
    }

    /// It was answered; whether it waited for that.
    pub(super) fn answered(&mut self, peer: Incarnation, lease: LeaseName, reader: Reader) -> bool {
        self.end((peer, lease, reader))
    }

    /// It waits no more; whether it did.
    fn end(&mut self, key: Key) -> bool {
        let Some(waiting) = self.waiting.remove(&key) else { return false };
        if let Some(due) = waiting.due {
            self.due.remove(&(due, key));
        }
        self.ends.remove(&(waiting.until, key));
        true
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

    pub(super) fn wake(&self) -> Option<Duration> {
        let first = |set: &BTreeSet<(Duration, Key)>| set.first().map(|(at, _)| *at);
        first(&self.due).into_iter().chain(first(&self.ends)).min()
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
