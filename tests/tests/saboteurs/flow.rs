//! Settling, queues, progress and threads.

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::thread::ThreadId;

use kvx_core::Result;
use kvx_core::backend::{Event, Events, Outcome, Submit, TransferBackend};
use kvx_core::handshake::HandshakeBytes;
use kvx_core::id::{PeerId, TransferId};

use crate::tools::{Later, Own, Queue, lock, settled, without_own};
use crate::wrapper::{At, Post, Sabotage};

#[derive(Default)]
pub(crate) struct SettledTwice {
    queue: Queue,
}

impl Sabotage for SettledTwice {
    fn poll(&self, at: &At, events: &mut Events) {
        self.queue.give(at, events, |event| match event {
            Event::Settled { id, outcome: Outcome::Done { .. } } => {
                vec![settled(id, Outcome::done()), settled(id, Outcome::done())]
            }
            other => vec![other],
        });
    }
}

/// Says within the call that a batch is done, and by an event once more.
pub(crate) struct DoneAndSettled;

impl Sabotage for DoneAndSettled {
    fn submit(&self, at: &At, post: Post<'_>) -> Result<Submit> {
        Ok(match post.to(at)? {
            Submit::Submitted => Submit::Done { route: None },
            other => other,
        })
    }
}

/// Forgets every seventh transfer.
#[derive(Default)]
pub(crate) struct SettledNever {
    queue: Queue,
    count: AtomicU64,
}

impl Sabotage for SettledNever {
    fn poll(&self, at: &At, events: &mut Events) {
        self.queue.give(at, events, |event| match event {
            Event::Settled { .. } if self.count.fetch_add(1, SeqCst) % 7 == 6 => Vec::new(),
            other => vec![other],
        });
    }
}

#[derive(Default)]
pub(crate) struct IdsCut {
    queue: Queue,
}

impl Sabotage for IdsCut {
    fn submit(&self, at: &At, post: Post<'_>) -> Result<Submit> {
        Post { id: TransferId(post.id.0 & 0xffff_ffff), ..post }.to(at)
    }

    fn poll(&self, at: &At, events: &mut Events) {
        self.queue.give(at, events, |event| vec![event]);
    }
}

/// Posts nothing until another side polls.
#[derive(Default)]
pub(crate) struct NeedsTheTarget {
    later: Later,
    backends: Mutex<BTreeMap<usize, Arc<dyn TransferBackend>>>,
}

impl Sabotage for NeedsTheTarget {
    fn opened(&self, at: &At) {
        lock(&self.backends).insert(at.index, Arc::clone(&at.backend));
    }

    fn submit(&self, at: &At, post: Post<'_>) -> Result<Submit> {
        self.later.hold(at, u32::MAX, post.held());
        Ok(Submit::Submitted)
    }

    fn poll(&self, at: &At, events: &mut Events) {
        for (index, post) in self.later.take(|index| index != at.index) {
            if let Some(backend) = lock(&self.backends).get(&index) {
                let poster = At { backend: Arc::clone(backend), index };
                if !post.try_to(&poster) {
                    self.later.hold(&poster, u32::MAX, post);
                }
            }
        }
        at.backend.poll(events);
    }
}

/// Posts nothing until its own side polls.
#[derive(Default)]
pub(crate) struct NeedsTheInitiator {
    later: Later,
}

impl Sabotage for NeedsTheInitiator {
    fn submit(&self, at: &At, post: Post<'_>) -> Result<Submit> {
        self.later.hold(at, 1, post.held());
        Ok(Submit::Submitted)
    }

    fn poll(&self, at: &At, events: &mut Events) {
        self.later.poll(at);
        at.backend.poll(events);
    }
}

/// What is done when the queue is full.
pub(crate) struct WhenFull {
    how: Full,
    own: Own,
    later: Later,
    queue: Queue,
    was: AtomicBool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Full {
    TakesMore,
    PostsLater,
    ForEver,
}

impl WhenFull {
    pub(crate) fn new(how: Full) -> Self {
        let was = AtomicBool::new(false);
        Self { how, own: Own::default(), later: Later::default(), queue: Queue::default(), was }
    }
}

impl Sabotage for WhenFull {
    fn submit(&self, at: &At, post: Post<'_>) -> Result<Submit> {
        if self.how == Full::ForEver && self.was.load(SeqCst) {
            return Ok(Submit::Full);
        }
        let submitted = post.to(at)?;
        if submitted == Submit::Submitted {
            return Ok(submitted);
        }
        self.was.store(true, SeqCst);
        match self.how {
            Full::ForEver => Ok(Submit::Full),
            Full::TakesMore => {
                self.later.hold(at, 1, post.held());
                Ok(Submit::Submitted)
            }
            Full::PostsLater => {
                self.later.hold(at, 1, Post { id: self.own.next(), ..post }.held());
                Ok(Submit::Full)
            }
        }
    }

    fn poll(&self, at: &At, events: &mut Events) {
        self.later.poll(at);
        self.queue.give(at, events, without_own);
    }
}

/// Posts what is right about a batch of which something is wrong.
#[derive(Default)]
pub(crate) struct ErrorButPosted;

impl Sabotage for ErrorButPosted {
    fn submit(&self, at: &At, post: Post<'_>) -> Result<Submit> {
        post.to(at).inspect_err(|_| {
            if let [first, _, ..] = post.segments {
                let _ = Post { segments: &[*first], ..post }.to(at);
            }
        })
    }
}

#[derive(Default)]
pub(crate) struct Overfills;

impl Sabotage for Overfills {
    fn poll(&self, at: &At, events: &mut Events) {
        let mut more = Events::with_limit(events.room() + 2);
        at.backend.poll(&mut more);
        more.drain().for_each(|event| events.push(event));
    }
}

/// Drops events when the thread that polls is not the one that polled before.
#[derive(Default)]
pub(crate) struct LostAmongThreads {
    last: Mutex<Option<ThreadId>>,
}

impl Sabotage for LostAmongThreads {
    fn poll(&self, at: &At, events: &mut Events) {
        let me = std::thread::current().id();
        let before = lock(&self.last).replace(me);
        if before.is_none_or(|before| before == me) {
            at.backend.poll(events);
        } else {
            at.backend.poll(&mut Events::with_limit(1));
        }
    }
}

/// Gives the settled event only to the thread that posted.
#[derive(Default)]
pub(crate) struct OnlyForTheirPoster {
    posters: Mutex<BTreeMap<TransferId, ThreadId>>,
    waiting: Mutex<Vec<Event>>,
}

impl Sabotage for OnlyForTheirPoster {
    fn submit(&self, at: &At, post: Post<'_>) -> Result<Submit> {
        lock(&self.posters).insert(post.id, std::thread::current().id());
        post.to(at)
    }

    fn poll(&self, at: &At, events: &mut Events) {
        let mut fresh = Events::with_limit(events.room());
        at.backend.poll(&mut fresh);
        let (me, posters) = (std::thread::current().id(), lock(&self.posters));
        let mut waiting = lock(&self.waiting);
        waiting.extend(fresh.drain());
        let mine = |event: &mut Event| match event {
            Event::Settled { id, .. } => posters.get(id) == Some(&me),
            _ => true,
        };
        let room = events.room();
        let given: Vec<_> = waiting.extract_if(.., mine).collect();
        for (index, event) in given.into_iter().enumerate() {
            if index < room {
                events.push(event);
            } else {
                waiting.push(event);
            }
        }
    }
}

/// Gives every settled event to every thread that polls.
#[derive(Default)]
pub(crate) struct ToEveryPoller {
    queues: Mutex<BTreeMap<String, VecDeque<TransferId>>>,
}

impl Sabotage for ToEveryPoller {
    fn poll(&self, at: &At, events: &mut Events) {
        let me = format!("{} {:?}", at.index, std::thread::current().id());
        let mut queues = lock(&self.queues);
        queues.entry(me.clone()).or_default();
        let mut fresh = Events::with_limit(events.room());
        at.backend.poll(&mut fresh);
        let side = format!("{} ", at.index);
        for event in fresh.drain() {
            let Event::Settled { id, .. } = event else { continue };
            for (_, queue) in queues.iter_mut().filter(|(name, _)| name.starts_with(&side)) {
                queue.push_back(id);
            }
        }
        let queue = queues.entry(me).or_default();
        while events.room() > 0
            && let Some(id) = queue.pop_front()
        {
            events.push(settled(id, Outcome::done()));
        }
    }
}

/// Clears its events when a peer is met.
#[derive(Default)]
pub(crate) struct MeetingLosesEvents;

impl Sabotage for MeetingLosesEvents {
    fn accept(&self, at: &At, offer: &HandshakeBytes) -> Result<(PeerId, HandshakeBytes)> {
        for _ in 0..20 {
            at.backend.poll(&mut Events::with_limit(64));
        }
        at.backend.accept(offer)
    }
}
