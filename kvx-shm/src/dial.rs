//! Dialling: this side connects to a peer that it has met.

use std::time::Instant;

use kvx_core::id::PeerId;
use kvx_core::{Result, limit_remedy};

use crate::engine::{Shared, socket_name};
use crate::error::{down, system};
use crate::host;
use crate::link::Mine;
use crate::message::{Hello, Message, Probe, Turned};
use crate::state::{Dialing, Source, State};
use crate::sys::socket;

impl Shared {
    /// Connects to a peer. Where that one has no time now, it is tried again later.
    pub(crate) fn dial(&self, state: &mut State, peer: PeerId) -> Result<()> {
        let Some(known) = state.peers.get_mut(peer) else { return Ok(()) };
        let Some(word) = known.their_word else { return Ok(()) };
        let (incarnation, own_word) = (known.incarnation, known.word);
        known.dialled = Some(Instant::now());
        let failed = |error| system("connect", "the connection cannot be made", error);
        let socket = match socket::dial(socket_name(&incarnation).as_bytes()) {
            Ok(socket) => socket,
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => return Ok(()),
            Err(error) if error.raw_os_error().and_then(limit_remedy).is_some() => {
                return Err(failed(error));
            }
            Err(error) => {
                return Err(down("connect", "the peer does not listen: it is gone, or its socket \
                    is in another network namespace")
                .with_native(error.raw_os_error().unwrap_or(0).into())
                .with_source(error));
            }
        };
        let who = socket::peer(&socket).map_err(failed)?;
        if let Err(refused) = self.admit(who.uid) {
            self.turn_away(&socket, incarnation, word, Turned::User(who.uid));
            return Err(refused);
        }
        let process = self.process(state, peer, &socket, who.pid).map_err(failed)?;
        host::allow(self.options.ptracer, who.pid);
        let mine = Mine::new(&self.porch).map_err(failed)?;
        let token = state.token(Source::Peer(peer));
        let sent = self.watch(&socket, token).and_then(|()| {
            let hello = self.hello(incarnation, word, own_word);
            socket::send(&socket, &hello.encode(), &mine.carried(&self.table))
        });
        if !matches!(sent, Ok(true)) {
            state.sources.remove(&token);
            return sent.map(drop).map_err(failed);
        }
        if let Some(known) = state.peers.get_mut(peer) {
            known.inbox = socket::Inbox::default();
            known.tokens.push(token);
            known.dialing = Some(Dialing { socket, mine, process, token });
        }
        Ok(())
    }

    pub(crate) fn hello(&self, to: [u8; 16], word: u64, own_word: u64) -> Message {
        let address = std::ptr::from_ref(&*self.probe).addr() as u64;
        let probe = Probe { address, value: self.probe_value };
        Message::Hello(Hello { from: self.incarnation, to, word, own_word, probe })
    }
}
