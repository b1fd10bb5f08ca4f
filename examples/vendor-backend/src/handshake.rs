//! How two sides meet. Each tells the other its address, and a word that only the other knows: whoever dials says it.

use std::net::SocketAddr;

use kvx_core::handshake::{Handshake, HandshakeBytes};
use kvx_core::id::{Incarnation, PeerId};
use kvx_core::wire::{self, Text};
use kvx_core::{Error, Result};
use serde::{Deserialize, Serialize};

use crate::NAME;
use crate::backend::PlainTcp;
use crate::error::gone;
use crate::memory::secret;
use crate::state::{Peer, Stage, State};

/// One message.
#[derive(Debug, Serialize, Deserialize)]
struct Letter {
    fabric: Text<32>,
    version: u32,
    step: Step,
    from: Incarnation,
    /// Where the sender listens.
    address: SocketAddr,
}

const VERSION: u32 = 1;

/// What a message is. An answer names whom it answers.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
enum Step {
    Offer,
    Reply { to: Incarnation, word: u64 },
    Completion { to: Incarnation, word: u64 },
}

/// Tells bytes that were garbled on their way: FNV-1a, which no single flipped bit gets past. Without it an offer of which
/// only the address is wrong would be taken, and the right one that follows would be no more than its repetition.
fn checksum(bytes: &[u8]) -> u64 {
    let mix = |sum: u64, byte: &u8| (sum ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, mix)
}

impl PlainTcp {
    fn write(&self, step: Step) -> Result<HandshakeBytes> {
        let letter = Letter {
            fabric: Text::new(NAME)?,
            version: VERSION,
            step,
            from: self.shared.incarnation,
            address: self.shared.address,
        };
        let mut bytes = wire::to_bytes("handshake", &letter)?;
        bytes.extend(checksum(&bytes).to_le_bytes());
        HandshakeBytes::new(bytes)
    }

    /// Reads a message: nothing of it is used unless all of it is right.
    fn read(&self, operation: &'static str, bytes: &HandshakeBytes) -> Result<Letter> {
        let garbled = || Error::peer(operation, "the handshake is garbled").with_backend(NAME);
        let (body, sum) = bytes.as_bytes().split_last_chunk().ok_or_else(garbled)?;
        if checksum(body) != u64::from_le_bytes(*sum) {
            return Err(garbled());
        }
        let letter: Letter = wire::from_bytes(operation, "the handshake", body)?;
        if letter.fabric.as_str() != NAME {
            return Err(Error::peer(operation, "the handshake is of another fabric")
                .with_backend(NAME)
                .with_context("fabric", letter.fabric));
        }
        if letter.version != VERSION {
            let (ours, theirs) = (("this side", VERSION), ("the peer", letter.version));
            return Err(Error::mismatch_between(operation, "handshake version", ours, theirs)
                .with_backend(NAME));
        }
        if letter.from == self.shared.incarnation {
            return Err(Error::peer(operation, "the message is this side's own").with_backend(NAME));
        }
        Ok(letter)
    }

    /// The word of a message that answers this side.
    fn answer(&self, operation: &'static str, step: Step, completion: bool) -> Result<u64> {
        let (to, word) = match step {
            Step::Reply { to, word } if !completion => (to, word),
            Step::Completion { to, word } if completion => (to, word),
            _ => return Err(Error::peer(operation, "a message of another step").with_backend(NAME)),
        };
        if to != self.shared.incarnation {
            return Err(Error::peer(operation, "it answers another incarnation")
                .with_backend(NAME)
                .with_context("to", to)
                .with_context("this_side", self.shared.incarnation));
        }
        Ok(word)
    }

    /// The sender of a message: known from now on, and the word by which it will be known when it dials.
    fn meet(state: &mut State, letter: &Letter, word: u64) -> Result<(PeerId, u64)> {
        if let Some(known) = state.known(letter.from) {
            return Ok((known, state.peer("handshake", known)?.word));
        }
        let handle = PeerId::new(state.slot()?, 0);
        state.peers.insert(handle, Peer::new(letter.from, letter.address, word));
        Ok((handle, word))
    }

    /// From now on this side may post. A thread dials, unless one did already.
    fn may_post(&self, operation: &'static str, handle: PeerId, word: u64) -> Result<()> {
        let first = self.shared.with(|state| {
            let stage = state.live(operation, handle)?.stage;
            if stage == Stage::Met {
                state.advance(handle, Stage::Dialling);
            }
            Ok::<_, Error>(stage == Stage::Met)
        })?;
        if !first {
            return Ok(());
        }
        let asking = self.shared.spawn("tcp-ask", move |shared| shared.ask(handle, word));
        asking.inspect_err(|_| {
            self.shared.with(|state| state.end(handle, Some("no thread was to be had")));
        })
    }
}

impl Handshake for PlainTcp {
    fn incarnation(&self) -> Incarnation {
        self.shared.incarnation
    }

    fn offer(&self) -> Result<HandshakeBytes> {
        self.shared.with(|state| {
            state.check_open("offer")?;
            state.offered = true;
            Ok::<_, Error>(())
        })?;
        self.write(Step::Offer)
    }

    fn accept(&self, offer: &HandshakeBytes) -> Result<(PeerId, HandshakeBytes)> {
        let letter = self.read("accept", offer)?;
        if !matches!(letter.step, Step::Offer) {
            return Err(Error::peer("accept", "a message of another step").with_backend(NAME));
        }
        let fresh = secret()?;
        let (handle, word) = self.shared.with(|state| {
            state.check_open("accept")?;
            Self::meet(state, &letter, fresh)
        })?;
        Ok((handle, self.write(Step::Reply { to: letter.from, word })?))
    }

    fn complete(&self, reply: &HandshakeBytes) -> Result<(PeerId, HandshakeBytes)> {
        let letter = self.read("complete", reply)?;
        let their_word = self.answer("complete", letter.step, false)?;
        let fresh = secret()?;
        let (handle, word) = self.shared.with(|state| {
            state.check_open("complete")?;
            if !state.offered {
                return Err(
                    Error::peer("complete", "a reply, but no offer was made").with_backend(NAME)
                );
            }
            Self::meet(state, &letter, fresh)
        })?;
        self.may_post("complete", handle, their_word)?;
        Ok((handle, self.write(Step::Completion { to: letter.from, word })?))
    }

    fn finish(&self, completion: &HandshakeBytes) -> Result<PeerId> {
        let letter = self.read("finish", completion)?;
        let their_word = self.answer("finish", letter.step, true)?;
        let handle = self.shared.with(|state| {
            state.check_open("finish")?;
            let known = state.known(letter.from);
            known.ok_or_else(|| gone("finish", "a completion, but no offer of it was accepted"))
        })?;
        self.may_post("finish", handle, their_word)?;
        Ok(handle)
    }
}
