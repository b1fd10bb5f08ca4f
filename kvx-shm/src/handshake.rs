//! How two engines meet: who they are, where they are, and each one's word for the connection.

use kvx_core::handshake::{Handshake, HandshakeBytes};
use kvx_core::id::{Incarnation, PeerId};
use kvx_core::{Error, Result};

use crate::backend::ShmBackend;
use crate::bytes::{Reader, Writer, checksum};
use crate::error::{BACKEND, closed, down, malformed};
use crate::host::Host;

const MAGIC: [u8; 8] = *b"kvx-shm\0";
/// Of the messages, of the pages that two engines share, and of what is in their rings.
pub(crate) const VERSION: u32 = 2;

/// A step of the handshake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    Offer = 1,
    Reply = 2,
    Completion = 3,
}

impl Step {
    const fn words(self) -> &'static str {
        match self {
            Self::Offer => "an offer",
            Self::Reply => "a reply",
            Self::Completion => "a completion",
        }
    }
}

/// A message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Hand {
    pub(crate) step: Step,
    pub(crate) from: [u8; 16],
    /// Zeros in an offer, which is for anybody.
    pub(crate) to: [u8; 16],
    /// The sender's word for the connection. An offer has none.
    pub(crate) word: u64,
    /// The receiver's word, which only an answer can have.
    pub(crate) echo: u64,
    pub(crate) host: Host,
}

impl Hand {
    const BYTES: usize = 8 + 4 + 4 + 16 + 16 + 8 + 8 + Host::BYTES + 8;

    pub(crate) fn encode(&self) -> Result<HandshakeBytes> {
        let mut to = Writer::default();
        to.bytes(&MAGIC).u32(VERSION).u32(self.step as u32);
        to.bytes(&self.from).bytes(&self.to).u64(self.word).u64(self.echo);
        self.host.encode(&mut to);
        let sum = checksum(&to.0);
        to.u64(sum);
        HandshakeBytes::new(to.0)
    }

    pub(crate) fn decode(
        operation: &'static str,
        bytes: &HandshakeBytes,
        expected: Step,
    ) -> Result<Self> {
        let bytes = bytes.as_bytes();
        let mut from = Reader(bytes);
        if from.array() != Some(MAGIC) {
            return Err(malformed(operation, "no message of shared memory's handshake"));
        }
        let version = from.u32().unwrap_or(0);
        let whole = bytes.len() == Self::BYTES
            && bytes[bytes.len() - 8..] == checksum(&bytes[..bytes.len() - 8]).to_le_bytes();
        if version != VERSION && bytes.len() >= Self::BYTES {
            let versions = (("this side", VERSION), ("the peer", version));
            return Err(Error::mismatch_between(operation, "version", versions.0, versions.1)
                .with_backend(BACKEND)
                .with_remedy("run the same version of kvx on both sides"));
        }
        if !whole {
            return Err(malformed(operation, "the message is damaged or cut short")
                .with_context("bytes", bytes.len()));
        }
        Self::fields(&mut from, expected).ok_or_else(|| {
            malformed(operation, "a message of another step of the handshake")
                .with_context("expected", expected.words())
        })
    }

    fn fields(from: &mut Reader<'_>, step: Step) -> Option<Self> {
        if from.u32()? != step as u32 {
            return None;
        }
        Some(Self {
            step,
            from: from.array()?,
            to: from.array()?,
            word: from.u64()?,
            echo: from.u64()?,
            host: Host::decode(from)?,
        })
    }
}

impl Handshake for ShmBackend {
    fn incarnation(&self) -> Incarnation {
        Incarnation::from_bytes(self.shared.incarnation)
    }

    fn offer(&self) -> Result<HandshakeBytes> {
        let mut state = self.shared.lock();
        if state.closed {
            return Err(closed("offer"));
        }
        state.offered = true;
        self.hand(Step::Offer, [0; 16], 0, 0).encode()
    }

    fn accept(&self, offer: &HandshakeBytes) -> Result<(PeerId, HandshakeBytes)> {
        let hand = self.read("accept", offer, Step::Offer)?;
        let mut state = self.shared.lock();
        let peer = self.shared.meet(&mut state, "accept", &hand)?;
        let word = state.peers.get(peer).map_or(0, |known| known.word);
        Ok((peer, self.hand(Step::Reply, hand.from, word, 0).encode()?))
    }

    fn complete(&self, reply: &HandshakeBytes) -> Result<(PeerId, HandshakeBytes)> {
        let hand = self.read("complete", reply, Step::Reply)?;
        let mut state = self.shared.lock();
        if !state.offered && !state.closed {
            return Err(malformed("complete", "a reply, but no offer was made"));
        }
        let peer = self.shared.meet(&mut state, "complete", &hand)?;
        self.shared.agree(&mut state, "complete", peer, hand.word)?;
        let word = state.peers.get(peer).map_or(0, |known| known.word);
        Ok((peer, self.hand(Step::Completion, hand.from, word, hand.word).encode()?))
    }

    fn finish(&self, completion: &HandshakeBytes) -> Result<PeerId> {
        let hand = self.read("finish", completion, Step::Completion)?;
        let mut state = self.shared.lock();
        let peer = state.known(&hand.from).filter(|peer| {
            state.peers.get(*peer).is_some_and(|known| known.word == hand.echo)
        });
        let peer = peer.ok_or_else(|| {
            state.why_ended(hand.echo).map_or_else(
                || down("finish", "the connection that it completes is over"),
                |why| why.over("finish"),
            )
        })?;
        self.shared.agree(&mut state, "finish", peer, hand.word)?;
        Ok(peer)
    }
}

impl ShmBackend {
    fn hand(&self, step: Step, to: [u8; 16], word: u64, echo: u64) -> Hand {
        Hand { step, from: self.shared.incarnation, to, word, echo, host: self.shared.host }
    }

    /// Reads a message to this side, from a place that can be met.
    fn read(&self, operation: &'static str, bytes: &HandshakeBytes, step: Step) -> Result<Hand> {
        if self.shared.lock().closed {
            return Err(closed(operation));
        }
        let hand = Hand::decode(operation, bytes, step)?;
        if step != Step::Offer && hand.to != self.shared.incarnation {
            return Err(malformed(operation, "a message to another incarnation"));
        }
        if hand.from == self.shared.incarnation {
            return Err(malformed(operation, "a message of this side's own"));
        }
        self.shared.host.meets(operation, &hand.host)?;
        Ok(hand)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_bit_matters() {
        let host = Host::here().unwrap();
        let hand =
            Hand { step: Step::Reply, from: [1; 16], to: [2; 16], word: 3, echo: 4, host };
        let bytes = hand.encode().unwrap();
        assert_eq!(bytes.as_bytes().len(), Hand::BYTES);
        assert_eq!(Hand::decode("complete", &bytes, Step::Reply).unwrap(), hand);
        assert!(Hand::decode("accept", &bytes, Step::Offer).is_err());
        for bit in 0..bytes.as_bytes().len() * 8 {
            let mut flipped = bytes.as_bytes().to_vec();
            flipped[bit / 8] ^= 1 << (bit % 8);
            let flipped = HandshakeBytes::new(flipped).unwrap();
            let error = Hand::decode("complete", &flipped, Step::Reply).unwrap_err();
            let version = (8 * 8..12 * 8).contains(&bit);
            assert_eq!(error.as_mismatch().is_some(), version, "bit {bit}: {error}");
        }
    }
}
