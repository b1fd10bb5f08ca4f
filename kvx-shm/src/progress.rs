//! The thread that sleeps on the sockets: it has peers met, heard and seen to go, and takes what they put into their rings.

use std::os::fd::OwnedFd;
use std::sync::MutexGuard;
use std::time::{Duration, Instant};

use kvx_core::id::PeerId;
use rustix::event::{Timespec, epoll};

use crate::engine::{CONNECT_BOUND, Shared, TOKEN_LISTENER, TOKEN_WAKE};
use crate::error::{BACKEND, system};
use crate::mail::has_room;
use crate::state::{Lanes, Phase, Source, State};
use crate::work::Scratch;

/// How often what cannot be waited for is looked at: the last reader of a connection that is over, room in a socket.
const SHORT: Duration = Duration::from_millis(1);
/// How often deadlines are looked at.
const LONG: Duration = Duration::from_millis(20);
/// How long peers are waited for while nobody at the door can be taken.
const DEAF_BOUND: Duration = Duration::from_millis(500);

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
                self.heed_door(&mut state, listener);
                self.round(&mut state);
                state = self.serve_small(state, &mut scratch);
                if state.closed && state.closing.is_empty() {
                    self.finish(&mut state);
                    return;
                }
                let watched = self.is_watched(&state);
                if !watched {
                    self.table.falls_asleep();
                    self.listens_again(&mut state);
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

    /// Takes what is in all rings. Events that this brings are not signalled yet.
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
                Phase::Down(_) => {}
            }
        }
        state.early.retain(|token, early| {
            let keep = now.duration_since(early.since) < CONNECT_BOUND;
            if !keep {
                state.sources.remove(token);
            }
            keep
        });
        self.signal(state);
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
            self.end(state, peer, Some(why.into()));
        } else if let Some((since, number)) = state.none_taken
            && now.duration_since(since) > DEAF_BOUND
        {
            let error = std::io::Error::from_raw_os_error(number);
            let error = system("connect", "the peer cannot be let in", error);
            self.end(state, peer, Some((&error).into()));
        } else if known.dialing.is_none()
            && known.dialled.is_none_or(|dialled| now.duration_since(dialled) >= LONG)
            && let Err(error) = self.dial(state, peer)
        {
            self.end(state, peer, Some((&error).into()));
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
                Some(Source::Door(peer)) => {
                    // It may have said why.
                    self.hear(state, peer, 0);
                    self.bury(state, peer, "the peer has ended the connection".into());
                }
            },
        }
    }
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
        (serve.runs.bytes() <= limit).then_some((*peer, at))
    })
}

/// How long the thread may sleep, if not for ever.
fn wait(state: &State) -> Option<Duration> {
    let mut wait = None;
    let mut at_most = |limit: Duration| wait = Some(wait.map_or(limit, |w: Duration| w.min(limit)));
    if !state.closing.is_empty() {
        at_most(SHORT);
    }
    if !state.early.is_empty() || state.deaf.is_some() {
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
