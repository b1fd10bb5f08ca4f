//! Connections that begin: who is at the door, and what makes a connection complete.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Instant;

use kvx_core::id::PeerId;

use crate::engine::Shared;
use crate::error::BACKEND;
use crate::host::{self, Reach};
use crate::link::{Link, Mine, Theirs};
use crate::message::{Hello, Message};
use crate::state::{Early, Source, State};
use crate::sys::socket::{self, Filled, Inbox};

/// Most connections whose first message has not come.
const MOST_EARLY: usize = 64;

impl Shared {
    pub(crate) fn answer_door(&self, state: &mut State, listener: &OwnedFd) {
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
            self.turn_away(&early.socket, hello.from, hello.own_word, who.uid);
            return Err(refused.to_string());
        }
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
        let mine = Mine::new(&self.porch).map_err(|error| error.to_string())?;
        host::allow(self.options.ptracer, who.pid);
        let answer = self.hello(hello.from, hello.own_word, known.word);
        let carried = mine.carried(&self.table);
        if !socket::send(&early.socket, &answer.encode(), &carried).map_err(|e| e.to_string())? {
            return Err("there is no room for an answer".into());
        }
        let mut brought = || early.inbox.descriptor().ok_or("it brought no memory");
        let theirs = [brought()?, brought()?, brought()?];
        let (socket, inbox) = (early.socket, early.inbox);
        self.linked(state, peer, socket, inbox, None, mine, &hello, theirs)
    }

    /// A connection is complete.
    #[expect(clippy::too_many_arguments, reason = "all that a connection is made of")]
    pub(crate) fn linked(
        &self,
        state: &mut State,
        peer: PeerId,
        socket: OwnedFd,
        inbox: Inbox,
        token: Option<u64>,
        mine: Mine,
        hello: &Hello,
        theirs: Theirs,
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
        let same_user = who.uid == rustix::process::geteuid().as_raw();
        let link = Link::new(socket, process, who.pid, reach, mine, theirs, same_user)?;
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
        if let Some(door) = link.door() {
            let token = state.token(Source::Door(peer));
            tokens.push(token);
            let listens = self.porch.listen_at(door).and_then(|()| self.watch_end(door, token));
            listens.map_err(|error| error.to_string())?;
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
}
