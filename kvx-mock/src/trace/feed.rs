//! What of an entry goes into the digest: every field, in 64 bits, whatever the width of the machine's words.

use kvx_core::id::{PeerId, RegionId, TransferId};
use kvx_core::transfer::Mode;

use super::{Entry, How, What};
use crate::digest::Digest;
use crate::rule::{Kind, Verdict};
use crate::timing::nanos;

impl Entry {
    pub(super) fn feed(&self, digest: &mut Digest) {
        digest.number(self.step);
        digest.number(nanos(self.at));
        digest.bytes(self.engine.as_bytes());
        self.what.feed(digest);
    }
}

impl What {
    fn feed(&self, digest: &mut Digest) {
        let mut put = |numbers: &[u64]| numbers.iter().for_each(|number| digest.number(*number));
        match self {
            Self::Opened => put(&[0]),
            Self::Registered(region) => put(&[1, region_bits(*region)]),
            Self::Deregistered(region) => put(&[2, region_bits(*region)]),
            Self::Met { peer, name } => {
                put(&[3, peer_bits(*peer)]);
                digest.bytes(name.as_bytes());
            }
            Self::Ready(peer) => put(&[4, peer_bits(*peer)]),
            Self::Submitted { id, peer, mode, segments, notify } => put(&[
                5,
                id.0,
                peer_bits(*peer),
                mode_bits(*mode),
                *segments as u64,
                notify.map_or(u64::MAX, |bytes| bytes as u64),
            ]),
            Self::Full(peer) => put(&[6, peer_bits(*peer)]),
            Self::Moved { id, segments } => put(&[7, id.0, *segments as u64]),
            Self::NoRoom(id) => put(&[8, id.0]),
            Self::Cancelled(id) => put(&[9, id.0]),
            Self::Settled { id, how } => put(&[10, id.0, how_bits(*how)]),
            Self::Notified { peer, bytes } => put(&[11, peer_bits(*peer), *bytes as u64]),
            Self::Lost { peer, bytes } => put(&[12, peer_bits(*peer), *bytes as u64]),
            Self::Severed(peer) => put(&[13, peer_bits(*peer)]),
            Self::Revoked(peer) => put(&[14, peer_bits(*peer)]),
            Self::Told(peer) => put(&[15, peer_bits(*peer)]),
            Self::Silent(peer) => put(&[16, peer_bits(*peer)]),
            Self::Broken(peer) => put(&[17, peer_bits(*peer)]),
            Self::PeerDown(peer) => put(&[18, peer_bits(*peer)]),
            Self::Closed => put(&[19]),
            Self::Killed => put(&[20]),
            Self::Stopped => put(&[21]),
            Self::Resumed => put(&[22]),
            Self::Cut(name) => {
                put(&[23]);
                digest.bytes(name.as_bytes());
            }
            Self::Healed(name) => {
                put(&[24]);
                digest.bytes(name.as_bytes());
            }
            Self::Ruled { kind, id, verdict } => {
                put(&[25]);
                feed_verdict(digest, *kind, *id, *verdict);
            }
            Self::Ignored { kind, id, verdict } => {
                put(&[26]);
                feed_verdict(digest, *kind, *id, *verdict);
            }
            Self::Suppressed { kind, id } => put(&[27, kind_bits(*kind), id.0]),
        }
    }
}

fn feed_verdict(digest: &mut Digest, kind: Kind, id: Option<TransferId>, verdict: Verdict) {
    digest.number(kind_bits(kind));
    digest.number(u64::from(id.is_some()));
    digest.number(id.map_or(0, |id| id.0));
    match verdict {
        Verdict::Pass => digest.number(0),
        Verdict::Drop => digest.number(1),
        Verdict::Delay(by) => {
            digest.number(2);
            digest.number(nanos(by));
        }
        Verdict::Double => digest.number(3),
        Verdict::Reorder => digest.number(4),
        Verdict::Hold => digest.number(5),
        Verdict::Fail(kind) => {
            digest.number(6);
            digest.bytes(kind.as_str().as_bytes());
        }
        Verdict::Full => digest.number(7),
    }
}

fn bits(slot: u32, generation: u32) -> u64 {
    u64::from(slot) << 32 | u64::from(generation)
}

fn peer_bits(peer: PeerId) -> u64 {
    bits(peer.slot(), peer.generation())
}

fn region_bits(region: RegionId) -> u64 {
    bits(region.slot(), region.generation())
}

const fn mode_bits(mode: Mode) -> u64 {
    match mode {
        Mode::Read => 0,
        Mode::Write => 1,
    }
}

const fn how_bits(how: How) -> u64 {
    match how {
        How::Done => 0,
        How::Cancelled => 1,
        How::Failed => 2,
    }
}

const fn kind_bits(kind: Kind) -> u64 {
    match kind {
        Kind::Register => 0,
        Kind::Handshake => 1,
        Kind::Post => 2,
        Kind::Data => 3,
        Kind::Completion => 4,
        Kind::Notification => 5,
    }
}
