//! The thread that sleeps on the sockets: it meets peers, takes what they put into their rings, and sees them go.

use std::os::fd::OwnedFd;
use std::sync::{Arc, MutexGuard};
use std::time::{Duration, Instant};

use kvx_core::backend::{Event, Outcome};
use kvx_core::id::PeerId;
use rustix::event::{Timespec, epoll};

use crate::engine::{CONNECT_BOUND, Shared, TOKEN_LISTENER, TOKEN_WAKE};
use crate::error::{BACKEND, refused};
use crate::host::{self, Reach};
use crate::link::{Link, Mine, RING};
use crate::message::{Answer, Hello, Message};
use crate::record::{self, Header, Record, Reply, Write};
use crate::state::{Early, Lanes, Peer, Phase, Place, Source, State};
use crate::sys::memfd::Foreign;
use crate::sys::socket::{self, Filled, Inbox};
use crate::work::{Run, Scratch, Serve, Target};

/// Most connections whose first message has not come.
const MOST_EARLY: usize = 64;
/// Most pieces of memory of one peer that are mapped here.
const MOST_SEGMENTS: usize = 1 << 14;
/// Most writes of one peer that wait: more than it may have in flight.
const MOST_WRITES: usize = 256;
/// A peer is not listened to while this many of its notifications were not polled, or this many bytes of them.
const MOST_NOTES: usize = 1 << 14;
const MOST_NOTE_BYTES: usize = 16 << 20;

/// A peer is not listened to while this many records wait for room in the ring to it.
const MOST_ANSWERS: usize = 1024;
/// Most messages that wait for room in the socket of a peer that asks for more.
const MOST_UNSENT: usize = 1 << 17;
/// Most records that are taken from one peer before others have their turn.
const MOST_RECORDS: usize = 512;
/// As many as a ring can hold.
const ALL_RECORDS: usize = RING / Header::BYTES;

/// How often what cannot be waited for is looked at: the last reader of a connection that is over, room in a socket.
const SHORT: Duration = Duration::from_millis(1);
/// How often deadlines are looked at.
const LONG: Duration = Duration::from_millis(20);

impl Shared {
    /// The life of the thread.
    pub(crate) fn progress(&self, listener: OwnedFd) {
        let listener = &listener;
        let mut events: Vec<epoll::Event> = Vec::with_capacity(64);
        let mut scratch = Scratch::default();
        loop {
            let (wait, asleep) = {
                let mut state = self.lock();
                for event in events.drain(..) {
                    self.happened(&mut state, listener, event.data.u64());
                }
                self.round(&mut state);
                state = self.serve_small(state, &mut scratch);
                if state.closed && state.closing.is_empty() {
                    self.finish(&mut state);
                    return;
                }
                let watched = self.is_watched(&state);
                if !watched {
                    self.table.falls_asleep();
                }
                if with_mail(&state).is_some() {
                    if !watched {
                        self.table.awakes();
                    }
                    continue;
                }
                let wait = wait(&state);
                let often = watched.then(|| self.options.spin());
                (wait.into_iter().chain(often).min(), !watched)
            };
            let limit = wait.and_then(|wait| Timespec::try_from(wait).ok());
            let buffer = rustix::buffer::spare_capacity(&mut events);
            if let Err(error) = epoll::wait(&self.epoll, buffer, limit.as_ref())
                && error != rustix::io::Errno::INTR
            {
                tracing::error!(backend = BACKEND, %error, "waiting for events failed");
                std::thread::sleep(LONG);
            }
            if asleep {
                self.table.awakes();
            }
        }
    }

    /// Whether the program polls so often that nobody need wake this thread. Then it looks up as often as the program would
    /// have, at the least.
    fn is_watched(&self, state: &State) -> bool {
        let spin = self.options.spin();
        !spin.is_zero() && state.polled.is_some_and(|polled| polled.elapsed() < spin)
    }

    /// Takes what is in all rings.
    pub(crate) fn look(&self, state: &mut State) {
        if with_mail(state).is_none() {
            return;
        }
        let mut record = std::mem::take(&mut state.record);
        for peer in state.open.values().copied().collect::<Vec<_>>() {
            if state.peers.get(peer).is_some_and(|known| known.link.is_some()) {
                self.take_mail(state, peer, &mut record, true);
            }
        }
        state.record = record;
        self.employ(state);
    }

    /// Looks at everything once.
    fn round(&self, state: &mut State) {
        let mut record = std::mem::take(&mut state.record);
        let peers: Vec<_> = state.peers.handles().collect();
        let now = Instant::now();
        for peer in peers {
            let Some(known) = state.peers.get(peer) else { continue };
            match &known.phase {
                Phase::Open if known.link.is_some() => {
                    self.take_mail(state, peer, &mut record, true);
                    self.flush(state, peer);
                }
                Phase::Open => self.still_connecting(state, peer, now),
                Phase::Closing(..) => self.try_finish(state, peer),
                Phase::Down => {}
            }
        }
        state.early.retain(|token, early| {
            let keep = now.duration_since(early.since) < CONNECT_BOUND;
            if !keep {
                state.sources.remove(token);
            }
            keep
        });
        state.record = record;
    }

    /// Carries out what is small enough that waking another thread would take longer.
    fn serve_small<'a>(
        &'a self,
        mut state: MutexGuard<'a, State>,
        scratch: &mut Scratch,
    ) -> MutexGuard<'a, State> {
        let limit = self.options.inline_bytes;
        while let Some((peer, at)) = small(&state, limit) {
            state.runnable.remove(at);
            state = self.serve_here(state, peer, scratch);
        }
        self.employ(&state);
        state
    }

    fn still_connecting(&self, state: &mut State, peer: PeerId, now: Instant) {
        let Some(known) = state.peers.get(peer) else { return };
        let Some(since) = known.ready else { return };
        if now.duration_since(since) > CONNECT_BOUND {
            let why = format!("the peer did not connect within {CONNECT_BOUND:?}");
            self.end(state, peer, Some(why));
        } else if known.dialing.is_none()
            && let Err(error) = self.dial(state, peer)
        {
            self.end(state, peer, Some(error.to_string()));
        }
    }

    /// The kernel says that something happened.
    fn happened(&self, state: &mut State, listener: &OwnedFd, token: u64) {
        match token {
            TOKEN_WAKE => self.woken(),
            TOKEN_LISTENER => self.answer_door(state, listener),
            token => match state.sources.get(&token).copied() {
                None => {}
                Some(Source::Early) => self.hear_early(state, token),
                Some(Source::Peer(peer)) => self.hear(state, peer, token),
                Some(Source::Process(peer)) => {
                    self.bury(state, peer, "the peer's process is gone".into());
                }
            },
        }
    }

    fn answer_door(&self, state: &mut State, listener: &OwnedFd) {
        while let Ok(Some(socket)) = socket::accept(listener) {
            if state.early.len() >= MOST_EARLY {
                // It may try again: those that say nothing are forgotten.
                continue;
            }
            let token = state.token(Source::Early);
            if self.watch(&socket, token).is_ok() {
                let (inbox, since) = (Inbox::default(), Instant::now());
                state.early.insert(token, Early { socket, inbox, since });
                // Most have said something by now, and make room for others.
                self.hear_early(state, token);
            } else {
                state.sources.remove(&token);
            }
        }
    }

    /// The first message of whoever connected.
    fn hear_early(&self, state: &mut State, token: u64) {
        let Some(mut early) = state.early.remove(&token) else { return };
        let filled = early.inbox.fill(&early.socket);
        let Some(frame) = early.inbox.next() else {
            if let Ok(Filled::Empty | Filled::More) = filled {
                state.early.insert(token, early);
            } else {
                state.sources.remove(&token);
            }
            return;
        };
        state.sources.remove(&token);
        self.watch_no_more(&early.socket);
        if let Err(why) = self.welcome(state, early, &frame) {
            tracing::warn!(backend = BACKEND, why, "a connection was refused");
        }
    }

    /// Takes a connection that a peer has made.
    fn welcome(
        &self,
        state: &mut State,
        mut early: Early,
        frame: &[u8; socket::FRAME],
    ) -> Result<(), String> {
        let Some(Message::Hello(hello)) = Message::decode(frame) else {
            return Err("its first message is no greeting".into());
        };
        let who = socket::peer(&early.socket).map_err(|error| error.to_string())?;
        self.admit(who.uid).map_err(|error| error.to_string())?;
        let peer = state.known(&hello.from).filter(|_| hello.to == self.incarnation);
        let peer = peer.ok_or("it is of nobody with whom there was a handshake")?;
        let known = state.peers.get_mut(peer).ok_or("the peer is gone")?;
        if known.word != hello.word || known.their_word.is_some_and(|word| word != hello.own_word) {
            return Err("it belongs to another connection".into());
        }
        if known.link.is_some() {
            return Err("there is a connection already".into());
        }
        if known.dialing.is_some() {
            // Both have dialled: the one of the lower incarnation counts, for both.
            if self.incarnation < hello.from {
                return Err("this side has dialled, too".into());
            }
            if let Some(dialing) = known.dialing.take() {
                self.watch_no_more(&dialing.socket);
                known.tokens.retain(|token| *token != dialing.token);
                state.sources.remove(&dialing.token);
            }
        }
        let Some(known) = state.peers.get_mut(peer) else { return Ok(()) };
        known.their_word = Some(hello.own_word);
        let mine = Mine::new().map_err(|error| error.to_string())?;
        host::allow(self.options.ptracer, who.pid);
        let answer = self.hello(hello.from, hello.own_word, known.word);
        let carried = [mine.fd(), self.table.fd()];
        if !socket::send(&early.socket, &answer.encode(), &carried).map_err(|e| e.to_string())? {
            return Err("there is no room for an answer".into());
        }
        let (page, table) = (early.inbox.descriptor(), early.inbox.descriptor());
        let (page, table) = page.zip(table).ok_or("it brought no memory")?;
        let (socket, inbox) = (early.socket, early.inbox);
        self.linked(state, peer, socket, inbox, None, mine, &hello, &page, &table)
    }

    /// A connection is complete.
    #[expect(clippy::too_many_arguments, reason = "all that a connection is made of")]
    fn linked(
        &self,
        state: &mut State,
        peer: PeerId,
        socket: OwnedFd,
        inbox: Inbox,
        token: Option<u64>,
        mine: Mine,
        hello: &Hello,
        page: &OwnedFd,
        table: &OwnedFd,
    ) -> Result<(), String> {
        let who = socket::peer(&socket).map_err(|error| error.to_string())?;
        let there = state.peers.get(peer).map_or(self.host, |known| known.host);
        let sees = self.host.sees_processes_of(&there);
        let process = match socket::peer_process(&socket, who.pid) {
            Ok(process) => process,
            Err(error) if sees => return Err(format!("its process cannot be watched: {error}")),
            Err(_) => None,
        };
        let reach = Reach::find(&self.host, &there, who.pid, hello.probe);
        let link = Link::new(socket, process, who.pid, reach, mine, page, table)?;
        let token = token.map_or_else(
            || {
                let token = state.token(Source::Peer(peer));
                self.watch(&link.socket, token).map(|()| token)
            },
            Ok,
        );
        let mut tokens = vec![token.map_err(|error| error.to_string())?];
        if let Some(process) = &link.process {
            let token = state.token(Source::Process(peer));
            self.watch(process, token).map_err(|error| error.to_string())?;
            tokens.push(token);
        }
        let Some(known) = state.peers.get_mut(peer) else { return Ok(()) };
        known.tokens = tokens;
        known.inbox = inbox;
        known.link = Some(Arc::new(link));
        state.wakers.drain(..).for_each(std::task::Waker::wake);
        self.hear(state, peer, 0);
        self.flush(state, peer);
        state.kick(peer);
        Ok(())
    }

    /// Takes what a peer has sent over the socket.
    fn hear(&self, state: &mut State, peer: PeerId, token: u64) {
        // More than an honest peer ever sends at once: one that does not stop must not hold this thread.
        for _ in 0..2 * MOST_SEGMENTS {
            let Some(known) = state.peers.get_mut(peer).filter(|known| known.phase == Phase::Open)
            else {
                return;
            };
            let dialing = known.dialing.as_ref();
            let socket = match (&known.link, dialing) {
                (Some(link), _) => &link.socket,
                (None, Some(dialing)) if dialing.token == token => &dialing.socket,
                _ => return,
            };
            let filled = known.inbox.fill(socket);
            while let Some(known) = state.peers.get_mut(peer)
                && let Some(frame) = known.inbox.next()
            {
                if let Err(why) = self.told(state, peer, &frame) {
                    return self.bury(state, peer, format!("the peer broke the protocol: {why}"));
                }
            }
            match filled {
                Ok(Filled::More) => {}
                Ok(Filled::Empty) => return,
                Ok(Filled::Over) => {
                    return self.hung_up(state, peer, "the peer has ended the connection");
                }
                Err(error) => {
                    let why = format!("the connection is broken: {error}");
                    return self.hung_up(state, peer, &why);
                }
            }
        }
    }

    /// The other side has hung up.
    fn hung_up(&self, state: &mut State, peer: PeerId, why: &str) {
        let Some(known) = state.peers.get_mut(peer) else { return };
        if known.link.is_none()
            && let Some(dialing) = known.dialing.take()
        {
            self.watch_no_more(&dialing.socket);
            // Both may have dialled, and the peer's call counts: it is on its way.
            if known.incarnation < self.incarnation {
                return;
            }
            return self.end(state, peer, Some("the peer refused the connection".into()));
        }
        self.bury(state, peer, why.to_owned());
    }

    /// A peer is gone: what it said before is heard, then the connection ends.
    fn bury(&self, state: &mut State, peer: PeerId, why: String) {
        let mut record = Vec::new();
        if state.peers.get(peer).is_some_and(|known| known.link.is_some()) {
            self.take_mail(state, peer, &mut record, false);
        }
        self.end(state, peer, Some(why));
    }

    /// One message of a peer's.
    fn told(
        &self,
        state: &mut State,
        peer: PeerId,
        frame: &[u8; socket::FRAME],
    ) -> Result<(), String> {
        let message = Message::decode(frame).ok_or("a message that makes no sense")?;
        let Some(known) = state.peers.get_mut(peer) else { return Ok(()) };
        let mut carried = Vec::new();
        for _ in 0..message.descriptors() {
            carried.push(known.inbox.descriptor().ok_or("a message without its descriptor")?);
        }
        match message {
            Message::Hello(hello) => {
                let dialing = known.dialing.take().ok_or("a second greeting")?;
                let (socket, token, mine) = (dialing.socket, dialing.token, dialing.mine);
                let right = hello.from == known.incarnation
                    && hello.to == self.incarnation
                    && hello.word == known.word
                    && Some(hello.own_word) == known.their_word;
                let inbox = std::mem::take(&mut known.inbox);
                if let ([page, table], true) = (carried.as_slice(), right) {
                    return self.linked(
                        state, peer, socket, inbox, Some(token), mine, &hello, page, table,
                    );
                }
                return Err("the greeting of somebody else".into());
            }
            Message::Bell => {}
            Message::Locate { token, slot, generation, secret } => {
                let region = kvx_core::id::RegionId::new(slot, generation);
                let registered = state.regions.get(region).filter(|r| r.secret == secret);
                let (answer, segment) = match registered {
                    None => (Answer::Nowhere, None),
                    Some(registered) => {
                        let bytes = registered.region.bytes();
                        match &registered.shared {
                            Some((segment, base)) => (
                                Answer::Shared { segment: segment.number, base: *base, bytes },
                                Some(Arc::clone(segment)),
                            ),
                            None => {
                                let address = registered.region.address().addr().get() as u64;
                                (Answer::Borrowed { address, bytes }, None)
                            }
                        }
                    }
                };
                if known.unsent.len() >= MOST_UNSENT {
                    return Err(format!("{MOST_UNSENT} questions without hearing the answers"));
                }
                if let Some(segment) = &segment {
                    known.send_segment(segment);
                }
                known.unsent.push_back((Message::Located { token, answer }, None));
                self.flush(state, peer);
            }
            Message::Located { token, answer } => {
                let asked = known.locating.remove(&token).ok_or("an answer to no question")?;
                let place = match answer {
                    Answer::Nowhere => Err("the peer has no such region (any more)".into()),
                    Answer::Shared { segment, base, bytes } => {
                        match known.foreign.get(&segment) {
                            Some(memory) if bytes == asked.bytes => {
                                inside(memory, base, bytes)
                                    .then(|| Place::Shared(Arc::clone(memory), base))
                                    .ok_or_else(|| "the peer's region is outside its memory".into())
                            }
                            Some(_) => Err("the peer's region and its key differ in size".into()),
                            None => Err("the peer's memory was not sent, or not taken".into()),
                        }
                    }
                    Answer::Borrowed { address, bytes } => {
                        let link = known.link.as_ref();
                        match link.map(|link| &link.reach) {
                            _ if bytes != asked.bytes => {
                                Err("the peer's region and its key differ in size".into())
                            }
                            _ if address.checked_add(bytes).is_none() => {
                                Err("the peer's region wraps around".into())
                            }
                            Some(Reach::No(why)) => Err(format!(
                                "the peer's borrowed memory cannot be read from here: {why}"
                            )),
                            _ => Ok(Place::Process(address)),
                        }
                    }
                };
                // Asked once, answered once.
                let _ = asked.place.set(place);
                state.kick(peer);
            }
            Message::Segment { segment } => {
                if known.foreign.len() >= MOST_SEGMENTS {
                    return Err(format!("more than {MOST_SEGMENTS} pieces of memory"));
                }
                for descriptor in &carried {
                    match Foreign::map(descriptor) {
                        Ok(memory) => drop(known.foreign.insert(segment, Arc::new(memory))),
                        // Transfers that need it will say so.
                        Err(why) => {
                            tracing::warn!(backend = BACKEND, why, "a peer's memory is not taken");
                        }
                    }
                }
            }
            Message::Forget { segment } => drop(known.foreign.remove(&segment)),
        }
        Ok(())
    }

    /// Takes what is in a peer's ring. Where its connection is over, writes are no longer carried out.
    fn take_mail(&self, state: &mut State, peer: PeerId, record: &mut Vec<u8>, open: bool) {
        let mut taken = false;
        for _ in 0..if open { MOST_RECORDS } else { ALL_RECORDS } {
            let Some(known) = state.peers.get_mut(peer).filter(|known| known.phase == Phase::Open)
            else {
                return;
            };
            let Some(link) = known.link.clone() else { return };
            known.stalled = known.notes >= MOST_NOTES || known.note_bytes >= MOST_NOTE_BYTES;
            if open && (known.stalled || !has_room(known)) {
                break;
            }
            match link.take(record) {
                Ok(true) => {}
                Ok(false) => break,
                Err(why) => {
                    return self.end(state, peer, Some(format!("the peer broke the protocol: {why}")));
                }
            }
            taken = true;
            match Record::decode(record) {
                Some(Record::Note(payload)) => {
                    known.notes += 1;
                    known.note_bytes += payload.len();
                    state.events.push_back(Event::Notified { peer, payload });
                    self.signal(state);
                }
                Some(Record::Reply { sequence, reply }) => {
                    if let Some(id) = known.writes.remove(&sequence) {
                        state.settle(id, outcome(reply, peer));
                        self.signal(state);
                        state.kick(peer);
                    }
                }
                Some(Record::Write(write)) if open => {
                    if known.serves.jobs.len() >= MOST_WRITES {
                        let why = format!("the peer broke the protocol: {MOST_WRITES} writes at once");
                        return self.end(state, peer, Some(why));
                    }
                    self.asked_to_write(state, peer, write);
                }
                Some(Record::Write(_)) => {}
                None => {
                    let why = "the peer broke the protocol: a record that makes no sense";
                    return self.end(state, peer, Some(why.into()));
                }
            }
        }
        let link = state.peers.get(peer).and_then(|known| known.link.as_ref());
        if let Some(link) = link.filter(|_| taken)
            && link.peer_wants_room()
        {
            link.ring_bell();
        }
    }

    fn asked_to_write(&self, state: &mut State, peer: PeerId, write: Write) {
        let missing = |state: &State| {
            state.peers.get(peer).is_some_and(|known| {
                write.sources.iter().any(|source| {
                    source.segment != 0 && !known.foreign.contains_key(&source.segment)
                })
            })
        };
        if missing(state) {
            // It was sent before the record was put, so it is in the socket.
            self.hear(state, peer, 0);
        }
        let sequence = write.sequence;
        match prepare(state, peer, write) {
            Ok(serve) => {
                if let Some(known) = state.peers.get_mut(peer) {
                    known.serves.jobs.push_back(serve);
                }
                state.kick(peer);
            }
            Err(reply) => self.send(state, peer, record::reply(sequence, reply), None, None),
        }
    }
}

/// Whether a peer takes this side's answers, so that it may ask for more.
fn has_room(known: &Peer) -> bool {
    known.out.len() < MOST_ANSWERS
}

/// A peer whose ring is not empty, and is listened to.
fn with_mail(state: &State) -> Option<PeerId> {
    state.open.values().copied().find(|peer| {
        let known = state.peers.get(*peer).filter(|known| !known.stalled && has_room(known));
        known.and_then(|known| known.link.as_ref()).is_some_and(|link| link.has_mail())
    })
}

/// A peer's write that can be carried out, of at most so many bytes, and where it is in the list.
fn small(state: &State, limit: u64) -> Option<(PeerId, usize)> {
    state.runnable.iter().enumerate().find_map(|(at, (peer, lane))| {
        let serve = state.peers.get(*peer).filter(|_| *lane == Lanes::Serves)?.serves.jobs.front()?;
        let bytes: usize = serve.runs.iter().map(|run| run.bytes).sum();
        (bytes as u64 <= limit).then_some((*peer, at))
    })
}

fn inside(memory: &Foreign, base: u64, bytes: u64) -> bool {
    base.checked_add(bytes).is_some_and(|end| end <= memory.bytes() as u64)
}

/// How long the thread may sleep, if not for ever.
fn wait(state: &State) -> Option<Duration> {
    let mut wait = None;
    let mut at_most = |limit: Duration| wait = Some(wait.map_or(limit, |w: Duration| w.min(limit)));
    if !state.closing.is_empty() {
        at_most(SHORT);
    }
    if !state.early.is_empty() {
        at_most(LONG);
    }
    for peer in state.open.values() {
        let Some(known) = state.peers.get(*peer) else { continue };
        if known.link.is_none() && known.ready.is_some() {
            at_most(LONG);
        }
        if known.link.is_some() && !known.unsent.is_empty() {
            at_most(SHORT);
        }
    }
    wait
}

fn outcome(reply: Reply, peer: PeerId) -> Outcome {
    let error = match reply {
        Reply::Done => return Outcome::Done,
        Reply::Cancelled => return Outcome::Cancelled,
        Reply::NoRegion => refused("transfer", "the peer has no such region (any more)"),
        Reply::Outside => refused("transfer", "the peer says that a segment is outside its region"),
        Reply::NoSource => refused("transfer", "the peer did not take this side's memory"),
        Reply::Kernel(code) => refused("transfer", "the peer cannot read this side's memory")
            .with_native(code.into())
            .with_source(std::io::Error::from_raw_os_error(code)),
        Reply::NoAccess => {
            kvx_core::Error::unsupported("transfer", "the peer may not read this side's borrowed memory")
                .with_backend(BACKEND)
                .with_remedy(
                    "set this side's option ptracer=any where kernel.yama.ptrace_scope is 1, give the peer \
                     CAP_SYS_PTRACE, or allocate the memory with kvx (kvx_shm::SharedMemory)",
                )
        }
    };
    Outcome::Failed(error.with_context("peer", peer))
}

/// Checks a peer's write against this side's regions, and its sources against what the peer has sent.
fn prepare(state: &State, peer: PeerId, write: Write) -> Result<Serve, Reply> {
    let known = state.peers.get(peer).ok_or(Reply::Cancelled)?;
    let mut hold = Vec::with_capacity(write.targets.len());
    for target in &write.targets {
        let region = kvx_core::id::RegionId::new(target.slot, target.generation);
        let registered = state.regions.get(region).filter(|r| r.secret == target.secret);
        let registered = registered.ok_or(Reply::NoRegion)?;
        hold.push((region, registered.region.clone()));
    }
    let mut places = Vec::with_capacity(write.sources.len());
    for source in &write.sources {
        places.push(if source.segment == 0 {
            if source.base.checked_add(source.bytes).is_none() {
                return Err(Reply::Outside);
            }
            Place::Process(source.base)
        } else {
            let memory = known.foreign.get(&source.segment).ok_or(Reply::NoSource)?;
            if !inside(memory, source.base, source.bytes) {
                return Err(Reply::Outside);
            }
            Place::Shared(Arc::clone(memory), source.base)
        });
    }
    let mut runs = Vec::with_capacity(write.parts.len());
    for part in &write.parts {
        let source = write.sources.get(part.source as usize).ok_or(Reply::Outside)?;
        let (_, region) = hold.get(part.target as usize).ok_or(Reply::Outside)?;
        let fits = |offset: u64, all: u64| {
            offset.checked_add(part.bytes).is_some_and(|end| end <= all)
        };
        if !fits(part.source_offset, source.bytes) || !fits(part.target_offset, region.bytes()) {
            return Err(Reply::Outside);
        }
        let at = usize::try_from(part.target_offset).map_err(|_| Reply::Outside)?;
        let bytes = usize::try_from(part.bytes).map_err(|_| Reply::Outside)?;
        // SAFETY: inside the region, as was just checked.
        let to = Target(unsafe { region.address().add(at) });
        runs.push(Run { place: part.source, offset: part.source_offset, to, bytes });
    }
    let Write { sequence, note, .. } = write;
    Ok(Serve { sequence, places, runs, hold, note, gone: false })
}
