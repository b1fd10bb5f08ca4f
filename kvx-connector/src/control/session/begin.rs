//! How a session begins: the preamble, Noise, who the other side is.

use std::sync::Arc;

use kvx_core::{Error, ErrorKind, Result};
use snow::{HandshakeState, TransportState};

use super::cipher::{Cipher, NOISE_BYTES, broken, noise};
use super::fault::wrong_key;
use super::preamble::{self, begins_well};
use super::{Fault, FaultKind, Session, SessionEvent, State};
use crate::control::record::Tag;
use crate::control::{RemoteIdentity, hello};

impl Session {
    pub(super) fn take_preamble(&mut self, item: &[u8]) -> Result<(), Fault> {
        let preamble = begins_well(item)?;
        let mine = preamble::write(&self.local.security);
        if preamble != mine {
            let with = |keys: bool| if keys { "with a key" } else { "without a key" };
            let (here, there) = (!self.local.security.keys().is_empty(), preamble[9] == 1);
            let error = if here == there {
                Error::peer("control", "a preamble that this side does not know")
            } else {
                Error::mismatch_between(
                    "control",
                    "security",
                    ("this side", with(here)),
                    ("the peer", with(there)),
                )
                .with_remedy("give both sides the same key")
            };
            return Err(Fault { kind: FaultKind::NotOurs, error });
        }
        if self.local.security.keys().is_empty() {
            return self.greet(None).map_err(Fault::local);
        }
        self.state = State::First(preamble);
        Ok(())
    }

    /// Looks for the key with which the first Noise message was made. That costs hashing, no curve.
    pub(super) fn take_first(
        &mut self,
        preamble: &[u8],
        record: &[u8],
        events: &mut Vec<SessionEvent>,
    ) -> Result<(), Fault> {
        let local = Arc::clone(&self.local);
        for (number, key) in local.security.keys().iter().enumerate() {
            let mut noise = noise(key, preamble)
                .and_then(|builder| builder.build_responder().map_err(broken))
                .map_err(Fault::local)?;
            if noise.read_message(record, &mut []).is_ok() {
                self.old_key = number > 0;
                self.state = State::Knocked(Box::new(noise));
                events.push(SessionEvent::Knocked);
                return Ok(());
            }
        }
        Err(wrong_key(false))
    }

    /// Answers who has [knocked](SessionEvent::Knocked): this is where the costly part of the handshake is done.
    ///
    /// # Errors
    ///
    /// The session is over.
    pub fn answer(&mut self) -> Result<(), Fault> {
        match std::mem::replace(&mut self.state, State::Over) {
            State::Knocked(mut noise) => {
                // The other side's half may be a point of small order: not what an honest one sends.
                self.write_noise(&mut noise)
                    .map_err(|error| Fault { kind: FaultKind::WrongKey, error })?;
                let transport =
                    noise.into_transport_mode().map_err(broken).map_err(Fault::local)?;
                self.greet(Some(transport)).map_err(Fault::local)
            }
            state => {
                self.state = state;
                Err(Fault::local(Error::misuse("control", "nobody has knocked")))
            }
        }
    }

    pub(super) fn write_noise(&mut self, noise: &mut HandshakeState) -> Result<()> {
        let mut message = [0; NOISE_BYTES];
        let bytes = noise.write_message(&[], &mut message).map_err(broken)?;
        let length = u16::try_from(bytes)
            .map_err(|_| Error::new(ErrorKind::Internal, "control", "a record is too long"))?;
        self.output.extend_from_slice(&length.to_le_bytes());
        self.output.extend_from_slice(&message[..bytes]);
        Ok(())
    }

    /// The keys are there: says hello.
    pub(super) fn greet(&mut self, noise: Option<TransportState>) -> Result<()> {
        let mut cipher = Cipher {
            noise: noise.map(Box::new),
            sent: 0,
            received: 0,
            rekey_every: self.rekey_every,
            max_records: self.max_records,
        };
        let hello = hello::write(&self.local.versions, &self.local.identity)?;
        cipher.seal(Tag::Hello, &hello, &mut self.output)?;
        self.state = State::Hello(cipher);
        Ok(())
    }

    pub(super) fn check_engine(&self, found: &RemoteIdentity) -> Result<(), Fault> {
        match &self.expected {
            Some((wanted, address)) if *wanted != found.engine => Err(Fault {
                kind: FaultKind::Refused,
                error: Error::mismatch_between(
                    "control",
                    "engine",
                    ("the request", wanted),
                    ("the engine that answers", &found.engine),
                )
                .with_kind(ErrorKind::Peer)
                .with_context("address", address)
                .with_remedy("check the address that the engine publishes"),
            }),
            _ => Ok(()),
        }
    }
}
