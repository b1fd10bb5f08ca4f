//! How two engines meet: who they are, their workers' addresses, and each one's word for the connection.

use std::sync::Arc;

use kvx_core::handshake::{Handshake, HandshakeBytes};
use kvx_core::id::{Incarnation, PeerId};
use kvx_core::wire::{self, Text};
use kvx_core::{Error, ErrorKind, Result};
use serde::{Deserialize, Serialize};

use crate::backend::UcxBackend;
use crate::core::Core;
use crate::error::{BACKEND, closed, down, malformed};
use crate::peer::Peer;
use crate::reach::Networks;
use crate::shared::random;
use crate::tags::space;

/// Of the messages of the handshake, of keys, and of those between two backends.
const VERSION: u32 = 3;

/// Most bytes of a worker's address. A host with dozens of devices has some thousands.
const MOST_ADDRESS: usize = 15 << 10;

/// Most connections, those included that are over and wait to be polled.
const MOST_PEERS: usize = 4096;

/// A message.
#[derive(Debug, Serialize, Deserialize)]
struct Letter {
    fabric: Text<16>,
    version: u32,
    /// Of UCX, for whoever looks why two sides do not understand each other.
    library: Text<32>,
    /// What reaches other hosts, for the same.
    networks: Networks,
    step: Step,
    from: Incarnation,
    #[serde(
        serialize_with = "wire::serialize_bytes",
        deserialize_with = "wire::bytes::<_, MOST_ADDRESS>"
    )]
    address: Vec<u8>,
}

/// What a message is. An answer names whom it answers, and says the sender's word for the connection; the last one also what it
/// answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
enum Step {
    Offer,
    Reply { to: Incarnation, word: u64 },
    Completion { to: Incarnation, word: u64, echo: u64 },
}

/// Tells bytes that were garbled on their way: FNV-1a. It keeps nobody out.
pub(crate) fn checksum(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |sum, byte| {
        (sum ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

impl UcxBackend {
    fn write(&self, step: Step) -> Result<HandshakeBytes> {
        let letter = Letter {
            fabric: Text::new(BACKEND)?,
            version: VERSION,
            library: Text::new(self.shared.context.library().version_text())?,
            networks: self.shared.look(|core| core.networks.clone()),
            step,
            from: Incarnation::from_bytes(self.shared.incarnation),
            address: self.shared.address.clone(),
        };
        let mut bytes = wire::to_bytes("handshake", &letter)?;
        bytes.extend(checksum(&bytes).to_le_bytes());
        HandshakeBytes::new(bytes).map_err(|error| {
            error
                .with_kind(ErrorKind::Resources)
                .with_backend(BACKEND)
                .with_remedy("UCX has too many devices to name: choose some with devices=...")
        })
    }

    /// Reads a message: nothing of it is used unless all of it is right.
    fn read(&self, operation: &'static str, bytes: &HandshakeBytes) -> Result<Letter> {
        if self.shared.look(|core| core.closed) {
            return Err(closed(operation));
        }
        let garbled = || malformed(operation, "the message is damaged or cut short");
        let (body, sum) = bytes.as_bytes().split_last_chunk().ok_or_else(garbled)?;
        if checksum(body) != u64::from_le_bytes(*sum) {
            return Err(garbled().with_context("bytes", bytes.as_bytes().len()));
        }
        let letter: Letter = wire::from_bytes(operation, "the handshake", body)
            .map_err(|error| error.with_backend(BACKEND))?;
        if letter.fabric.as_str() != BACKEND {
            return Err(malformed(operation, "the message is of another fabric")
                .with_context("fabric", letter.fabric));
        }
        if letter.version != VERSION {
            let (ours, theirs) = (("this side", VERSION), ("the peer", letter.version));
            return Err(Error::mismatch_between(operation, "version", ours, theirs)
                .with_backend(BACKEND)
                .with_remedy("run the same version of kvx on both sides"));
        }
        let ours = self.shared.context.library().version_text();
        if !understand_each_other(&ours, letter.library.as_str()) {
            let (ours, theirs) = (("this side", &*ours), ("the peer", letter.library.as_str()));
            return Err(Error::mismatch_between(operation, "UCX", ours, theirs).with_backend(BACKEND).with_remedy(
                "UCX before 1.20 may end the process of another version that it connects to: use the same on both sides, or 1.20 or later",
            ));
        }
        if *letter.from.as_bytes() == self.shared.incarnation {
            return Err(malformed(operation, "a message of this side's own"));
        }
        if letter.address.is_empty() {
            return Err(malformed(operation, "the peer has no address"));
        }
        if let Step::Reply { to, .. } | Step::Completion { to, .. } = letter.step
            && *to.as_bytes() != self.shared.incarnation
        {
            return Err(malformed(operation, "a message to another incarnation"));
        }
        Ok(letter)
    }
}

/// Whether two versions of UCX may connect. 1.13 and 1.22 were seen to end the process of one of them where there is more than one
/// device, as they choose different ones, and to find no way to each other; 1.20 and 1.22 understand each other. What is between is
/// not known.
fn understand_each_other(ours: &str, theirs: &str) -> bool {
    let minor = |text: &str| -> Option<(u32, u32)> {
        let mut numbers = text.split('.').map(|number| number.parse().ok());
        Some((numbers.next()??, numbers.next()??))
    };
    match (minor(ours), minor(theirs)) {
        (Some(ours), Some(theirs)) => ours == theirs || ours.min(theirs) >= (1, 20),
        _ => ours == theirs,
    }
}

fn another_step(operation: &'static str) -> Error {
    malformed(operation, "a message of another step of the handshake")
}

impl Core {
    /// The peer that a message is from, known from now on.
    fn meet(&mut self, operation: &'static str, letter: &Letter, fresh: u64) -> Result<PeerId> {
        if self.closed {
            return Err(closed(operation));
        }
        let incarnation = *letter.from.as_bytes();
        if let Some(known) = self.open.get(&incarnation).copied() {
            let said = match letter.step {
                Step::Offer => None,
                Step::Reply { word, .. } | Step::Completion { word, .. } => Some(word),
            };
            let their_word = self.peers.get(known).and_then(|peer| peer.their_word);
            if said.is_none() || their_word.is_none() || said == their_word {
                return Ok(known);
            }
            // It has ended the connection, and this side has not heard of it.
            self.end(known, Some(down("connection", "the peer has begun another connection")));
        }
        if self.peers.len() >= MOST_PEERS {
            return Err(Error::new(ErrorKind::Resources, operation, "no room for one more connection")
                .with_backend(BACKEND)
                .with_context("connections", MOST_PEERS)
                .with_context("open", self.open.len())
                .with_remedy("poll, so that those that are over are forgotten, or sever some"));
        }
        let address = Arc::from(letter.address.as_slice());
        // No two connections have tags in common.
        let mut fresh = fresh;
        while self.words.contains_key(&space(fresh)) {
            fresh = fresh.wrapping_add(1 << 32);
        }
        let known = Peer::new(incarnation, address, (letter.library.clone(), letter.networks.clone()), fresh);
        let peer = self.peers.insert(known).ok_or_else(|| {
            Error::new(ErrorKind::Resources, operation, "as many peers as can be named").with_backend(BACKEND)
        })?;
        self.open.insert(incarnation, peer);
        self.words.insert(space(fresh), peer);
        Ok(peer)
    }

    /// Makes the endpoint before the peer hears that it may connect. UCX makes one by itself for a peer that connects first; where
    /// no transport reaches the peer, 1.22 was seen to end the process then (`ucp_ep_set_lanes_failed` of one that has none). Such a
    /// peer is not met. 1.13 does not look at routes, and may end the process when an endpoint is closed that never connected.
    fn finds(&mut self, operation: &'static str, peer: PeerId) -> Result<()> {
        if self.library.is_fragile() {
            return Ok(());
        }
        let Err(error) = self.find(operation, peer) else { return Ok(()) };
        if self.peers.get(peer).is_some_and(|known| known.ready) {
            self.end(peer, Some(error.again()));
        } else if let Some(unmet) = self.peers.remove(peer) {
            // Nobody has heard of it.
            self.open.remove(&unmet.incarnation);
            self.words.remove(&space(unmet.word));
        }
        Err(error)
    }

    /// From now on this side may post. Both sides make an endpoint for each connection: UCX pairs them by their number, and what
    /// it makes by itself for a peer's requests can be ended only through that.
    fn agree(&mut self, operation: &'static str, peer: PeerId, word: u64) -> u64 {
        let Some(known) = self.peers.get_mut(peer) else { return 0 };
        known.their_word = Some(word);
        known.ready = true;
        let own = known.word;
        // Where that fails, connecting says so.
        let _ = self.way(operation, peer);
        own
    }

    fn word(&self, peer: PeerId) -> u64 {
        self.peers.get(peer).map_or(0, |known| known.word)
    }
}

impl Handshake for UcxBackend {
    fn incarnation(&self) -> Incarnation {
        Incarnation::from_bytes(self.shared.incarnation)
    }

    fn offer(&self) -> Result<HandshakeBytes> {
        self.shared.look(|core| {
            if core.closed {
                return Err(closed("offer"));
            }
            core.offered = true;
            Ok(())
        })?;
        self.write(Step::Offer)
    }

    fn accept(&self, offer: &HandshakeBytes) -> Result<(PeerId, HandshakeBytes)> {
        let letter = self.read("accept", offer)?;
        if letter.step != Step::Offer {
            return Err(another_step("accept"));
        }
        let fresh = random()?;
        let (peer, word) = self.shared.with(|core| {
            let peer = core.meet("accept", &letter, fresh)?;
            core.finds("accept", peer)?;
            Ok::<_, Error>((peer, core.word(peer)))
        })?;
        Ok((peer, self.write(Step::Reply { to: letter.from, word })?))
    }

    fn complete(&self, reply: &HandshakeBytes) -> Result<(PeerId, HandshakeBytes)> {
        let letter = self.read("complete", reply)?;
        let Step::Reply { word: theirs, .. } = letter.step else { return Err(another_step("complete")) };
        let fresh = random()?;
        let (peer, word) = self.shared.with(|core| {
            if !core.offered && !core.closed {
                return Err(malformed("complete", "a reply, but no offer was made"));
            }
            let peer = core.meet("complete", &letter, fresh)?;
            Ok((peer, core.agree("complete", peer, theirs)))
        })?;
        Ok((peer, self.write(Step::Completion { to: letter.from, word, echo: theirs })?))
    }

    fn finish(&self, completion: &HandshakeBytes) -> Result<PeerId> {
        let letter = self.read("finish", completion)?;
        let Step::Completion { word: theirs, echo, .. } = letter.step else { return Err(another_step("finish")) };
        self.shared.with(|core| {
            let known = core.by_word(echo).filter(|peer| {
                core.peers.get(*peer).is_some_and(|peer| peer.incarnation == *letter.from.as_bytes())
            });
            let peer = known.ok_or_else(|| down("finish", "the connection that it completes is over"))?;
            let other = core.peers.get(peer).and_then(|known| known.their_word).filter(|word| *word != theirs);
            if other.is_some() {
                core.end(peer, Some(down("connection", "the peer has begun another connection")));
                return Err(down("finish", "the connection that it completes is over"));
            }
            core.agree("finish", peer, theirs);
            Ok(peer)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::understand_each_other;

    #[test]
    fn versions_before_1_20_connect_to_their_like_alone() {
        for (one, other) in [("1.13.1", "1.13.0"), ("1.20.0", "1.22.0"), ("1.22.1", "2.0.0"), ("1.20.0", "1.20.1")] {
            assert!(understand_each_other(one, other) && understand_each_other(other, one), "{one} {other}");
        }
        for (one, other) in [("1.13.1", "1.22.0"), ("1.13.1", "1.20.0"), ("1.19.0", "1.13.1"), ("1.13.1", ""), ("1.20.0", "?")] {
            assert!(!understand_each_other(one, other) && !understand_each_other(other, one), "{one} {other}");
        }
    }
}
