//! Notifications that come early, twice, never, cut, or to the wrong peer.

use kvx_core::backend::{Event, Events, Outcome, Submit};
use kvx_core::id::TransferId;
use kvx_core::transfer::Mode;
use kvx_core::{Error, Result};

use crate::tools::{InFlight, Later, Own, Peers, Queue, notes_peers, settled, without_own};
use crate::wrapper::{At, Post, Sabotage};

/// Tells the peer first, and moves the data later, where the batch is of this kind.
pub(crate) struct NotifiedBeforeData {
    which: fn(&Post<'_>) -> bool,
    own: Own,
    later: Later,
    queue: Queue,
}

impl NotifiedBeforeData {
    fn new(which: fn(&Post<'_>) -> bool) -> Self {
        Self { which, own: Own::default(), later: Later::default(), queue: Queue::default() }
    }

    pub(crate) fn always() -> Self {
        Self::new(|_| true)
    }

    pub(crate) fn of_many_segments() -> Self {
        Self::new(|post| post.segments.len() > 8)
    }

    pub(crate) fn of_much_data() -> Self {
        Self::new(|post| post.segments.iter().map(|segment| segment.bytes).sum::<u64>() >= 65536)
    }
}

impl Sabotage for NotifiedBeforeData {
    fn submit(&self, at: &At, post: Post<'_>) -> Result<Submit> {
        if post.notify.is_none() || post.segments.is_empty() || !(self.which)(&post) {
            return post.to(at);
        }
        let first = Post { id: self.own.next(), segments: &[], ..post }.to(at)?;
        if first == Submit::Submitted {
            self.later.hold(at, 200, Post { notify: None, ..post }.held());
        }
        Ok(first)
    }

    fn poll(&self, at: &At, events: &mut Events) {
        self.later.poll(at);
        self.queue.give(at, events, without_own);
    }
}

/// Sends every notification once more.
#[derive(Default)]
pub(crate) struct NotifiedTwice {
    own: Own,
    queue: Queue,
}

impl Sabotage for NotifiedTwice {
    fn submit(&self, at: &At, post: Post<'_>) -> Result<Submit> {
        let submitted = post.to(at)?;
        if submitted == Submit::Submitted && post.notify.is_some() {
            let _ = Post { id: self.own.next(), segments: &[], ..post }.to(at)?;
        }
        Ok(submitted)
    }

    fn poll(&self, at: &At, events: &mut Events) {
        self.queue.give(at, events, without_own);
    }
}

/// The receiver changes what it gives, or drops it.
#[derive(Default)]
pub(crate) struct Received {
    queue: Queue,
    drops: bool,
}

impl Received {
    pub(crate) fn dropped() -> Self {
        Self { drops: true, ..Self::default() }
    }
}

impl Sabotage for Received {
    fn poll(&self, at: &At, events: &mut Events) {
        self.queue.give(at, events, |event| match event {
            Event::Notified { .. } if self.drops => Vec::new(),
            Event::Notified { peer, mut payload } => {
                if let Some(first) = payload.first_mut() {
                    *first ^= 0x40;
                }
                vec![Event::Notified { peer, payload }]
            }
            other => vec![other],
        });
    }
}

#[derive(Default)]
pub(crate) struct NotifiedToWrongPeer {
    peers: Peers,
}

impl Sabotage for NotifiedToWrongPeer {
    notes_peers!();

    fn submit(&self, at: &At, post: Post<'_>) -> Result<Submit> {
        match self.peers.other(at, post.peer) {
            Some(peer) if post.segments.is_empty() => Post { peer, ..post }.to(at),
            _ => post.to(at),
        }
    }
}

/// The notification is changed before it is posted, or the post refused.
pub(crate) struct Sent(pub(crate) fn(&At, Post<'_>) -> Result<Submit>);

impl Sabotage for Sent {
    fn submit(&self, at: &At, post: Post<'_>) -> Result<Submit> {
        (self.0)(at, post)
    }
}

pub(crate) fn bare_refused(at: &At, post: Post<'_>) -> Result<Submit> {
    if post.segments.is_empty() {
        return Err(Error::misuse("submit", "no segments"));
    }
    post.to(at)
}

pub(crate) fn longest_cut(at: &At, post: Post<'_>) -> Result<Submit> {
    let limit = at.backend.capabilities().limits.max_notification_bytes as usize;
    let notify = post.notify.map(|note| if note.len() == limit { &note[1..] } else { note });
    Post { notify, ..post }.to(at)
}

pub(crate) fn empty_beside_data_lost(at: &At, post: Post<'_>) -> Result<Submit> {
    let notify = post.notify.filter(|note| post.segments.is_empty() || !note.is_empty());
    Post { notify, ..post }.to(at)
}

pub(crate) fn longest_beside_data_cut(at: &At, post: Post<'_>) -> Result<Submit> {
    if post.segments.is_empty() { post.to(at) } else { longest_cut(at, post) }
}

pub(crate) fn long_beside_a_read_cut(at: &At, post: Post<'_>) -> Result<Submit> {
    let cuts = post.mode == Mode::Read && !post.segments.is_empty();
    let notify = post.notify.map(|note| if cuts { &note[..note.len().min(16)] } else { note });
    Post { notify, ..post }.to(at)
}

pub(crate) fn oversize_cut(at: &At, post: Post<'_>) -> Result<Submit> {
    let limit = at.backend.capabilities().limits.max_notification_bytes as usize;
    let notify = post.notify.map(|note| &note[..note.len().min(limit)]);
    Post { notify, ..post }.to(at)
}

pub(crate) fn inline_not_notified(at: &At, post: Post<'_>) -> Result<Submit> {
    let bytes: u64 = post.segments.iter().map(|segment| segment.bytes).sum();
    let notify = post.notify.filter(|_| post.segments.is_empty() || bytes > 8);
    Post { notify, ..post }.to(at)
}

#[derive(Default)]
pub(crate) struct BareNotDelivered {
    queue: Queue,
}

impl Sabotage for BareNotDelivered {
    fn submit(&self, at: &At, post: Post<'_>) -> Result<Submit> {
        if !post.segments.is_empty() {
            return post.to(at);
        }
        self.queue.push(at, settled(post.id, Outcome::done()));
        Ok(Submit::Submitted)
    }

    fn poll(&self, at: &At, events: &mut Events) {
        self.queue.give(at, events, |event| vec![event]);
    }
}

/// When the peer is told.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Told {
    Never,
    AtTheNextPoll,
    Twice,
}

/// Is done within the call with whatever has a notification, but does not notify as it must.
pub(crate) struct DoneAtOnce {
    told: Told,
    own: Own,
    later: Later,
    queue: Queue,
}

impl DoneAtOnce {
    pub(crate) fn new(told: Told) -> Self {
        Self { told, own: Own::default(), later: Later::default(), queue: Queue::default() }
    }

    /// Moves the data, and waits for that. What else happens is kept.
    fn carry_out(&self, at: &At, post: Post<'_>) -> Result<Submit> {
        let id = self.own.next();
        let submitted = Post { id, notify: None, ..post }.to(at)?;
        let mut settled = submitted != Submit::Submitted;
        while !settled {
            let mut events = Events::with_limit(64);
            at.backend.poll(&mut events);
            for event in events.drain() {
                settled |= matches!(event, Event::Settled { id: which, .. } if which == id);
                for event in without_own(event) {
                    self.queue.push(at, event);
                }
            }
        }
        Ok(submitted)
    }
}

impl Sabotage for DoneAtOnce {
    fn submit(&self, at: &At, post: Post<'_>) -> Result<Submit> {
        if post.notify.is_none() {
            return post.to(at);
        }
        if !post.segments.is_empty() && self.carry_out(at, post)? == Submit::Full {
            return Ok(Submit::Full);
        }
        let note = || Post { id: self.own.next(), segments: &[], ..post };
        match self.told {
            Told::Never => {}
            Told::AtTheNextPoll => self.later.hold(at, 1, note().held()),
            Told::Twice => {
                let _ = (note().to(at)?, note().to(at)?);
            }
        }
        Ok(Submit::Done { route: None })
    }

    fn poll(&self, at: &At, events: &mut Events) {
        self.later.poll(at);
        self.queue.give(at, events, without_own);
    }
}

/// Has room for many, gives what fits, and forgets the rest.
#[derive(Default)]
pub(crate) struct EventsLost;

impl Sabotage for EventsLost {
    fn poll(&self, at: &At, events: &mut Events) {
        let mut all = Events::with_limit(64);
        at.backend.poll(&mut all);
        for event in all.drain() {
            if events.room() > 0 {
                events.push(event);
            }
        }
    }
}

/// Sends the notification of what is cancelled all the same.
#[derive(Default)]
pub(crate) struct NotifiedThoughCancelled {
    own: Own,
    queue: Queue,
    in_flight: InFlight,
}

impl Sabotage for NotifiedThoughCancelled {
    fn submit(&self, at: &At, post: Post<'_>) -> Result<Submit> {
        self.in_flight.submit(at, post)
    }

    fn cancel(&self, at: &At, id: TransferId) -> Result<()> {
        at.backend.cancel(id)?;
        if let Some(held) = self.in_flight.remove(at, id) {
            let _ = Post { id: self.own.next(), segments: &[], ..held.post() }.to(at)?;
        }
        Ok(())
    }

    fn poll(&self, at: &At, events: &mut Events) {
        self.queue.give(at, events, without_own);
    }
}
