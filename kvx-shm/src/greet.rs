//! Connections that begin: who is at the door, and what makes a connection complete.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvx_core::id::PeerId;
use kvx_core::limit_remedy;

use crate::ending::Why;
use crate::engine::{Shared, TOKEN_LISTENER};
use crate::error::{BACKEND, system};
use crate::host::{self, Reach};
use crate::link::{Link, Mine, Seen};
use crate::message::{Hello, Message, Turned};
use crate::state::{Early, Source, State};
use crate::sys::socket::{self, Filled, Inbox};

/// Most connections whose first message has not come.
const MOST_EARLY: usize = 64;

/// How long those at the door are left alone when none of them could be taken.
const DEAF: Duration = Duration::from_millis(20);
/// How often it is said that none can be.
const TOLD_AGAIN: Duration = Duration::from_secs(1);

/// A connection that both sides have greeted each other over, and what they gave each other.
pub(crate) struct Call {
    pub(crate) socket: OwnedFd,
    pub(crate) inbox: Inbox,
    pub(crate) who: socket::Peer,
    pub(crate) mine: Mine,
    pub(crate) theirs: Seen,
    /// The peer's, where this side can see it.
    pub(crate) process: Option<OwnedFd>,
}

impl Shared {
    pub(crate) fn answer_door(&self, state: &mut State, listener: &OwnedFd) {
        loop {
            let socket = match socket::accept(listener) {
                Ok(Some(socket)) => socket,
                Ok(None) => return,
                Err(error) => {
                    // With the one that is kept for this, whoever comes can be told.
                    if state.spare.take().is_some() {
                        continue;
                    }
                    return self.cannot_answer(state, listener, &error);
                }
            };
            state.none_taken = None;
            if state.early.len() >= MOST_EARLY {
                // It may try again: those that say nothing are forgotten.
                continue;
            }
            let token = state.token(Source::Early);
            let watched = self.watch(&socket, token);
            let (inbox, since) = (Inbox::default(), Instant::now());
            state.early.insert(token, Early { socket, inbox, since });
            // Most have said something by now, and make room for others.
            self.hear_early(state, token);
            if watched.is_err() {
                state.early.remove(&token);
                state.sources.remove(&token);
            }
        }
    }

    /// The kernel would tell again at once of those who wait at the door: it is not heeded for a while.
    fn cannot_answer(&self, state: &mut State, listener: &OwnedFd, error: &std::io::Error) {
        self.watch_no_more(listener);
        let now = Instant::now();
        state.none_taken.get_or_insert_with(|| (now, error.raw_os_error().unwrap_or(0)));
        let told = state.deaf_told.is_some_and(|told| now.duration_since(told) < TOLD_AGAIN);
        if !told {
            state.deaf_told = Some(now);
            let remedy = error.raw_os_error().and_then(limit_remedy).unwrap_or_default();
            tracing::warn!(backend = BACKEND, %error, remedy, "no connection can be taken");
        }
        state.deaf = Some(now);
    }

    /// After a while the door is heeded again; and a descriptor is kept for it, once there is one.
    pub(crate) fn heed_door(&self, state: &mut State, listener: &OwnedFd) {
        if state.spare.is_none() && !state.closed {
            state.spare = listener.try_clone().ok();
        }
        if state.deaf.is_some_and(|since| since.elapsed() >= DEAF)
            && self.watch(listener, TOKEN_LISTENER).is_ok()
        {
            state.deaf = None;
        }
    }

    /// The first message of whoever connected.
    pub(crate) fn hear_early(&self, state: &mut State, token: u64) {
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
        let hello = match Message::decode(frame) {
            Some(Message::Hello(hello)) => hello,
            Some(Message::Refused(refused)) if refused.to == self.incarnation => {
                let peer = state.known(&refused.from).filter(|peer| {
                    state.peers.get(*peer).is_some_and(|known| {
                        known.word == refused.word && known.link.is_none()
                    })
                });
                let peer = peer.ok_or("it is of nobody with whom there was a handshake")?;
                self.turned_away(state, peer, &refused);
                return Ok(());
            }
            _ => return Err("its first message is no greeting".into()),
        };
        let who = socket::peer(&early.socket).map_err(|error| error.to_string())?;
        if let Err(refused) = self.admit(who.uid) {
            self.turn_away(&early.socket, hello.from, hello.own_word, Turned::User(who.uid));
            return Err(refused.to_string());
        }
        let peer = state.known(&hello.from).filter(|_| hello.to == self.incarnation);
        let Some(peer) = peer else {
            // Where this side had no descriptor to tell it before, it is told now.
            if let Some(number) = state.why_ended(hello.word).and_then(|why| why.system) {
                let why = Turned::System(number);
                self.turn_away(&early.socket, hello.from, hello.own_word, why);
            }
            return Err("it is of nobody with whom there was a handshake".into());
        };
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
        let word = known.word;
        match self.prepare(state, peer, &mut early, who) {
            Ok((mine, theirs, process)) => {
                host::allow(self.options.ptracer, who.pid);
                let answer = self.hello(hello.from, hello.own_word, word);
                let carried = mine.carried(&self.table);
                let sent = socket::send(&early.socket, &answer.encode(), &carried);
                if !sent.map_err(|error| error.to_string())? {
                    return Err("there is no room for an answer".into());
                }
                let Early { socket, inbox, .. } = early;
                let call = Call { socket, inbox, who, mine, theirs, process };
                if let Err(why) = self.linked(state, peer, call, None, &hello) {
                    let text = why.text.clone().into_owned();
                    self.end(state, peer, Some(why));
                    return Err(text);
                }
                Ok(())
            }
            Err(mut why) => {
                let text = why.text.clone().into_owned();
                if let Some(number) = why.system.take() {
                    let why = Turned::System(number);
                    self.turn_away(&early.socket, hello.from, hello.own_word, why);
                }
                self.end(state, peer, Some(why));
                Err(text)
            }
        }
    }

    /// What this side gives for a connection, and what it takes: all for which the system may have no descriptor left.
    fn prepare(
        &self,
        state: &State,
        peer: PeerId,
        early: &mut Early,
        who: socket::Peer,
    ) -> Result<(Mine, Seen, Option<OwnedFd>), Why> {
        let failed = |error| {
            Why::from(&system("connection", "this side cannot have what the connection takes", error))
        };
        let mut taken = || early.inbox.descriptor();
        let theirs = taken().zip(taken()).zip(taken());
        let Some(((page, table), door)) = theirs else {
            return Err(early.inbox.cut().map_or_else(|| "it brought no memory".into(), failed));
        };
        let process = self.process(state, peer, &early.socket, who.pid).map_err(failed)?;
        let mine = Mine::new(&self.porch).map_err(failed)?;
        Ok((mine, Seen::new([page, table, door], who.is_of_this_user())?, process))
    }

    /// The process at the other end, where this side can see it.
    pub(crate) fn process(
        &self,
        state: &State,
        peer: PeerId,
        socket: &OwnedFd,
        pid: i32,
    ) -> std::io::Result<Option<OwnedFd>> {
        let there = state.peers.get(peer).map_or(self.host, |known| known.host);
        match socket::peer_process(socket, pid) {
            Err(error) if self.host.sees_processes_of(&there) => Err(error),
            found => Ok(found.unwrap_or_default()),
        }
    }

    /// A connection is complete.
    ///
    /// # Errors
    ///
    /// It cannot be watched, and is to be ended.
    pub(crate) fn linked(
        &self,
        state: &mut State,
        peer: PeerId,
        call: Call,
        token: Option<u64>,
        hello: &Hello,
    ) -> Result<(), Why> {
        let failed = |error| {
            let what = "the connection cannot be watched";
            Why::from(&system("connection", what, error))
        };
        let Call { socket, inbox, who, mine, theirs, process } = call;
        let there = state.peers.get(peer).map_or(self.host, |known| known.host);
        let reach = Reach::find(&self.host, &there, who.pid, hello.probe);
        let link = Arc::new(Link::new(socket, process, who.pid, reach, mine, theirs));
        let mut tokens = Vec::from_iter(token);
        let mut watch = || {
            if token.is_none() {
                let token = state.token(Source::Peer(peer));
                tokens.push(token);
                self.watch(&link.socket, token)?;
            }
            if let Some(process) = &link.process {
                let token = state.token(Source::Process(peer));
                tokens.push(token);
                self.watch(process, token)?;
            }
            if let Some(door) = link.door() {
                let token = state.token(Source::Door(peer));
                tokens.push(token);
                self.porch.listen_at(door)?;
                self.watch_end(door, token)?;
            }
            Ok(())
        };
        let watched = watch();
        let Some(known) = state.peers.get_mut(peer) else { return Ok(()) };
        known.tokens = tokens;
        known.inbox = inbox;
        // Even if it ends here: the peer is told by it.
        known.link = Some(link);
        watched.map_err(failed)?;
        state.wakers.drain(..).for_each(std::task::Waker::wake);
        self.hear(state, peer, 0);
        self.flush(state, peer);
        state.kick(peer);
        Ok(())
    }
}
