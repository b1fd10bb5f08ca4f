//! How two engines of a fabric meet, and the bytes that they exchange for it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use kvx_core::handshake::{Handshake, HandshakeBytes};
use kvx_core::id::{Incarnation, PeerId};
use kvx_core::{Error, ErrorKind, Result};

use crate::backend::MockBackend;
use crate::engine::{Peer, PeerState};
use crate::error::{BACKEND, down, malformed, ruled, unpolled};
use crate::fabric::FabricId;
use crate::net::{ConnectionId, EngineId, Net};
use crate::preset::Preset;
use crate::rule::{Kind as Asked, Party, Verdict};
use crate::schedule::Lane;
use crate::trace::What;

impl Handshake for MockBackend {
    fn incarnation(&self) -> Incarnation {
        self.incarnation
    }

    fn offer(&self) -> Result<HandshakeBytes> {
        self.with(|net, engine| {
            let entry = net.engine_mut("offer", engine)?;
            entry.check_open("offer")?;
            entry.offered = true;
            net.message(engine, Kind::Offer, Incarnation::from_bytes([0; 16]), 0)
        })
    }

    fn accept(&self, offer: &HandshakeBytes) -> Result<(PeerId, HandshakeBytes)> {
        self.with(|net, engine| {
            let message = net.read("accept", engine, Kind::Offer, offer)?;
            let other = net.sender("accept", &message)?;
            net.ask_about_message("accept", other, engine, offer)?;
            let connection = net.connection(engine, other);
            let peer = net.join(engine, connection, other, message.from)?;
            Ok((peer, net.message(engine, Kind::Reply, message.from, connection)?))
        })
    }

    fn complete(&self, reply: &HandshakeBytes) -> Result<(PeerId, HandshakeBytes)> {
        self.with(|net, engine| {
            let operation = "complete";
            let message = net.read(operation, engine, Kind::Reply, reply)?;
            if !net.engine(operation, engine)?.offered {
                return Err(malformed(operation, "a reply, but this side made no offer"));
            }
            let other = net.current(operation, engine, &message)?;
            net.ask_about_message(operation, other, engine, reply)?;
            let peer = net.join(engine, message.connection, other, message.from)?;
            net.set_ready(engine, peer);
            let completion =
                net.message(engine, Kind::Completion, message.from, message.connection)?;
            Ok((peer, completion))
        })
    }

    fn finish(&self, completion: &HandshakeBytes) -> Result<PeerId> {
        self.with(|net, engine| {
            let operation = "finish";
            let message = net.read(operation, engine, Kind::Completion, completion)?;
            let other = net.current(operation, engine, &message)?;
            net.ask_about_message(operation, other, engine, completion)?;
            let peer = net.own_side(engine, message.connection).ok_or_else(|| {
                malformed(operation, "a completion, but this side accepted no offer")
            })?;
            net.set_ready(engine, peer);
            Ok(peer)
        })
    }
}

impl Net {
    /// Decodes a message and checks that it is for this engine and of a fabric like its own.
    fn read(
        &self,
        operation: &'static str,
        engine: EngineId,
        kind: Kind,
        bytes: &HandshakeBytes,
    ) -> Result<Message> {
        let entry = self.engine(operation, engine)?;
        entry.check_open(operation)?;
        let (preset, me) = (entry.preset.name(), entry.incarnation);
        Message::read(operation, kind, bytes, &Reader { fabric: self.id, preset, me })
    }

    /// Asks the rules about a message that an engine takes from another.
    fn ask_about_message(
        &mut self,
        operation: &'static str,
        from: EngineId,
        to: EngineId,
        bytes: &HandshakeBytes,
    ) -> Result<()> {
        let entry = self.engine(operation, to)?;
        let party = Party { name: Arc::clone(&entry.name), incarnation: entry.incarnation };
        let bytes = bytes.as_bytes().len() as u64;
        match self.ask(Asked::Handshake, from, (to, party), None, None, bytes) {
            Some((_, (Verdict::Fail(kind), _))) => Err(ruled(operation, kind)),
            _ => Ok(()),
        }
    }

    /// The engine that sent a message.
    fn sender(&self, operation: &'static str, message: &Message) -> Result<EngineId> {
        self.incarnations.get(&message.from).copied().ok_or_else(|| {
            down(operation, "the peer is gone").with_context("incarnation", message.from)
        })
    }

    /// As [`sender`](Self::sender), where the message's connection is the live one between the two.
    fn current(
        &self,
        operation: &'static str,
        engine: EngineId,
        message: &Message,
    ) -> Result<EngineId> {
        let other = self.sender(operation, message)?;
        let pair = (engine.min(other), engine.max(other));
        if self.pairs.get(&pair) != Some(&message.connection) {
            return Err(down(operation, "the connection that it belongs to is over")
                .with_context("incarnation", message.from));
        }
        Ok(other)
    }

    fn own_side(&self, engine: EngineId, connection: ConnectionId) -> Option<PeerId> {
        let sides = self.connections.get(&connection)?.sides;
        sides.iter().find(|side| side.0 == engine)?.1
    }

    /// An engine's handle of the other side of a connection, made if there is none.
    fn join(
        &mut self,
        engine: EngineId,
        connection: ConnectionId,
        other: EngineId,
        incarnation: Incarnation,
    ) -> Result<PeerId> {
        if let Some(peer) = self.own_side(engine, connection) {
            return Ok(peer);
        }
        if self.engine("handshake", engine)?.inbox.downs >= Preset::MOST_NOTIFICATIONS {
            return Err(unpolled("handshake"));
        }
        for lane in self.lanes_of(engine) {
            if self.side(lane).is_some_and(|side| side.engine == other) {
                self.retire(lane);
            }
        }
        let reverse = self.own_side(other, connection);
        let side = Peer {
            engine: other,
            name: Arc::clone(&self.engine("handshake", other)?.name),
            incarnation,
            connection,
            reverse,
            ready: false,
            state: PeerState::Open,
            revoked: false,
            broken: false,
            keys: BTreeSet::new(),
            transfers: BTreeMap::new(),
            notes: BTreeMap::new(),
            in_flight: 0,
            busy_until: 0,
            notice: None,
            silence: None,
            loss: None,
            finish: None,
        };
        let peer = self.engine_mut("handshake", engine)?.peers.insert(side).ok_or_else(|| {
            Error::new(ErrorKind::Resources, "handshake", "no handle is left").with_backend(BACKEND)
        })?;
        if let Some(entry) = self.connections.get_mut(&connection) {
            for side in entry.sides.iter_mut().filter(|side| side.0 == engine) {
                side.1 = Some(peer);
            }
        }
        if let Some(reverse) = reverse
            && let Some(side) = self.side_mut(Lane { engine: other, peer: reverse })
        {
            side.reverse = Some(peer);
        }
        let name = Arc::clone(&self.engine("handshake", other)?.name);
        self.record(engine, What::Met { peer, name });
        self.watch(Lane { engine, peer });
        Ok(peer)
    }

    fn set_ready(&mut self, engine: EngineId, peer: PeerId) {
        let side = self.side_mut(Lane { engine, peer });
        if side.is_some_and(|side| !std::mem::replace(&mut side.ready, true)) {
            self.record(engine, What::Ready(peer));
        }
    }

    fn message(
        &self,
        engine: EngineId,
        kind: Kind,
        to: Incarnation,
        connection: ConnectionId,
    ) -> Result<HandshakeBytes> {
        let entry = self.engine("handshake", engine)?;
        let preset = entry.preset.name().to_owned();
        Message { kind, fabric: self.id, from: entry.incarnation, to, connection, preset }.encode()
    }
}

/// A step of the handshake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Offer,
    Reply,
    Completion,
}

impl Kind {
    const ALL: [Self; 3] = [Self::Offer, Self::Reply, Self::Completion];

    const fn name(self) -> &'static str {
        match self {
            Self::Offer => "offer",
            Self::Reply => "reply",
            Self::Completion => "completion",
        }
    }
}

/// What the bytes of a handshake say.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Message {
    pub(crate) kind: Kind,
    pub(crate) fabric: FabricId,
    pub(crate) from: Incarnation,
    pub(crate) to: Incarnation,
    pub(crate) connection: ConnectionId,
    pub(crate) preset: String,
}

/// Who reads a message.
pub(crate) struct Reader {
    pub(crate) fabric: FabricId,
    pub(crate) preset: &'static str,
    pub(crate) me: Incarnation,
}

/// `kvxmock`, version, kind, seed, process, from, to, connection, then the preset's name; numbers in little endian.
const MAGIC: [u8; 7] = *b"kvxmock";
const VERSION: u8 = 1;

impl Message {
    /// Decodes a message and checks that it is for this engine and of a fabric like its own.
    pub(crate) fn read(
        operation: &'static str,
        kind: Kind,
        bytes: &HandshakeBytes,
        reader: &Reader,
    ) -> Result<Self> {
        let message = Self::decode(operation, bytes.as_bytes())?;
        let differ = |field, mine: String, theirs: String| {
            Error::mismatch_between(operation, field, ("this side", mine), ("the peer", theirs))
                .with_backend(BACKEND)
        };
        if message.fabric != reader.fabric {
            let (mine, theirs) = (reader.fabric.to_string(), message.fabric.to_string());
            return Err(differ("fabric", mine, theirs)
                .with_remedy("the mock connects engines of one process and one seed only"));
        }
        if message.preset != reader.preset {
            return Err(differ("preset", reader.preset.into(), message.preset)
                .with_remedy("open both engines with the same preset"));
        }
        if message.kind != kind {
            return Err(malformed(operation, "a message of another step of the handshake")
                .with_context("expected", kind.name())
                .with_context("received", message.kind.name()));
        }
        if message.from == reader.me {
            return Err(malformed(operation, "a message of this engine itself"));
        }
        if kind != Kind::Offer && message.to != reader.me {
            return Err(malformed(operation, "the message answers another incarnation")
                .with_context("this_side", reader.me)
                .with_context("answered", message.to));
        }
        Ok(message)
    }

    pub(crate) fn encode(&self) -> Result<HandshakeBytes> {
        let mut bytes = MAGIC.to_vec();
        bytes.extend([VERSION, self.kind as u8]);
        bytes.extend(self.fabric.seed.to_le_bytes());
        bytes.extend(self.fabric.process);
        bytes.extend(self.from.as_bytes());
        bytes.extend(self.to.as_bytes());
        bytes.extend(self.connection.to_le_bytes());
        bytes.extend(self.preset.as_bytes());
        HandshakeBytes::new(bytes)
    }

    fn decode(operation: &'static str, bytes: &[u8]) -> Result<Self> {
        let wrong = || malformed(operation, "this is not a handshake of the mock");
        let rest = bytes.strip_prefix(&MAGIC).ok_or_else(wrong)?;
        let ([version, kind], rest) = rest.split_first_chunk().ok_or_else(wrong)?;
        if *version != VERSION {
            let (mine, theirs) = (("this side", VERSION), ("the peer", *version));
            return Err(Error::mismatch_between(operation, "handshake_version", mine, theirs)
                .with_backend(BACKEND));
        }
        let kind = Kind::ALL.into_iter().find(|known| *known as u8 == *kind).ok_or_else(wrong)?;
        let (seed, rest) = rest.split_first_chunk().ok_or_else(wrong)?;
        let (process, rest) = rest.split_first_chunk().ok_or_else(wrong)?;
        let (from, rest) = rest.split_first_chunk().ok_or_else(wrong)?;
        let (to, rest) = rest.split_first_chunk().ok_or_else(wrong)?;
        let (connection, preset) = rest.split_first_chunk().ok_or_else(wrong)?;
        let preset = std::str::from_utf8(preset).map_err(|_| wrong())?;
        if preset.is_empty() || preset.len() > 32 {
            return Err(wrong());
        }
        Ok(Self {
            kind,
            fabric: FabricId { seed: u64::from_le_bytes(*seed), process: *process },
            from: Incarnation::from_bytes(*from),
            to: Incarnation::from_bytes(*to),
            connection: u64::from_le_bytes(*connection),
            preset: preset.to_owned(),
        })
    }
}
