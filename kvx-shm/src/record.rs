//! Records of a ring: what one engine asks of another, and answers.
//!
//! Whole words, the first of which says length and kind. Everything is checked again by whoever reads it.

use crate::bytes::{Reader, Writer};
use crate::route::Route;

/// Records begin and end at multiples of this.
pub(crate) const ALIGN: usize = 8;

/// Kind of what fills the end of the ring.
pub(crate) const PAD: u32 = 0;
const WRITE: u32 = 1;
const NOTE: u32 = 2;
const REPLY: u32 = 3;

/// Bytes of a write's source, of its target, and of its part.
const SOURCE: usize = 24;
const TARGET: usize = 16;
const PART: usize = 32;

/// The first words of a record.
pub(crate) struct Header;

impl Header {
    /// Bytes of a header: length, kind, sequence.
    pub(crate) const BYTES: usize = 16;

    pub(crate) fn padding(bytes: usize) -> [u8; 8] {
        Self::first(bytes, PAD)
    }

    fn first(bytes: usize, kind: u32) -> [u8; 8] {
        let bytes = u32::try_from(bytes).unwrap_or(u32::MAX);
        (u64::from(bytes) | u64::from(kind) << 32).to_le_bytes()
    }

    /// Length and kind.
    pub(crate) fn of(first: [u8; 8]) -> (usize, u32) {
        let word = u64::from_le_bytes(first);
        (usize::try_from(word & 0xffff_ffff).unwrap_or(0), u32::try_from(word >> 32).unwrap_or(0))
    }
}

/// Memory of the initiator's, from which a write takes its bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Source {
    /// Number of the memory that has a descriptor, 0 when it is reached through the kernel.
    pub(crate) segment: u64,
    /// Offset in the segment, or address in the process.
    pub(crate) base: u64,
    pub(crate) bytes: u64,
}

/// A region of the owner's, by the key that the initiator has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Target {
    pub(crate) slot: u32,
    pub(crate) generation: u32,
    pub(crate) secret: u64,
}

/// Part of a write: from an offset of a source to an offset of a target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Part {
    pub(crate) source: u32,
    pub(crate) target: u32,
    pub(crate) source_offset: u64,
    pub(crate) target_offset: u64,
    pub(crate) bytes: u64,
}

impl Part {
    fn encode(&self) -> [u8; PART] {
        let mut bytes = [0; PART];
        bytes[..4].copy_from_slice(&self.source.to_le_bytes());
        bytes[4..8].copy_from_slice(&self.target.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.source_offset.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.target_offset.to_le_bytes());
        bytes[24..].copy_from_slice(&self.bytes.to_le_bytes());
        bytes
    }

    fn decode(bytes: &[u8; PART]) -> Self {
        let word = |at: usize| u32::from_le_bytes(*bytes[at..].first_chunk().unwrap_or(&[0; 4]));
        let long = |at: usize| u64::from_le_bytes(*bytes[at..].first_chunk().unwrap_or(&[0; 8]));
        Self {
            source: word(0),
            target: word(4),
            source_offset: long(8),
            target_offset: long(16),
            bytes: long(24),
        }
    }
}

/// A write, for the owner of the targets to carry out.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Write {
    pub(crate) sequence: u64,
    pub(crate) sources: Vec<Source>,
    pub(crate) targets: Vec<Target>,
    pub(crate) parts: Vec<Part>,
    pub(crate) note: Option<Vec<u8>>,
}

/// What became of a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reply {
    /// All is there, and by these ways.
    Done(Route),
    Cancelled,
    /// A region is not registered (any more), or the key is wrong.
    NoRegion,
    /// A part is outside its region or its memory.
    Outside,
    /// The owner has not been sent the memory of a source.
    NoSource,
    /// The kernel refused to read the source: its error number.
    Kernel(i32),
    /// The owner may not read this process's memory: the number says why.
    NoAccess,
}

/// A record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Record {
    Write(Write),
    Note(Vec<u8>),
    Reply { sequence: u64, reply: Reply },
}

impl Write {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let count = |length: usize| u32::try_from(length).unwrap_or(u32::MAX);
        let mut to = begin(self.sequence);
        let note = self.note.as_ref().map_or(0, Vec::len);
        let bytes = self.sources.len() * SOURCE + self.targets.len() * TARGET;
        to.0.reserve_exact(bytes + self.parts.len() * PART + note + 32 + ALIGN);
        to.u32(count(self.sources.len())).u32(count(self.targets.len()));
        to.u32(count(self.parts.len()));
        to.u32(self.note.as_ref().map_or(0, |note| count(note.len()) + 1));
        for Source { segment, base, bytes } in &self.sources {
            to.u64(*segment).u64(*base).u64(*bytes);
        }
        for Target { slot, generation, secret } in &self.targets {
            to.u32(*slot).u32(*generation).u64(*secret);
        }
        for part in &self.parts {
            to.bytes(&part.encode());
        }
        to.bytes(self.note.as_deref().unwrap_or_default());
        end(to, WRITE)
    }
}

pub(crate) fn note(payload: &[u8]) -> Vec<u8> {
    let mut to = begin(0);
    to.u64(payload.len() as u64).bytes(payload);
    end(to, NOTE)
}

pub(crate) fn reply(sequence: u64, reply: Reply) -> Vec<u8> {
    let mut to = begin(sequence);
    let (status, code) = match reply {
        Reply::Done(route) => (0, route.word()),
        Reply::Cancelled => (1, 0),
        Reply::NoRegion => (2, 0),
        Reply::Outside => (3, 0),
        Reply::NoSource => (4, 0),
        Reply::Kernel(code) => (5, code.cast_unsigned()),
        Reply::NoAccess => (6, 0),
    };
    to.u32(status).u32(code);
    end(to, REPLY)
}

fn begin(sequence: u64) -> Writer {
    let mut to = Writer::default();
    to.u64(0).u64(sequence);
    to
}

fn end(mut to: Writer, kind: u32) -> Vec<u8> {
    to.pad();
    let first = Header::first(to.0.len(), kind);
    to.0[..8].copy_from_slice(&first);
    to.0
}

impl Record {
    /// Reads a record that came from a peer.
    pub(crate) fn decode(bytes: &[u8]) -> Option<Self> {
        let (first, rest) = bytes.split_first_chunk::<8>()?;
        let mut from = Reader(rest);
        let sequence = from.u64()?;
        Some(match Header::of(*first).1 {
            WRITE => Self::Write(write(sequence, &mut from)?),
            NOTE => {
                let length = usize::try_from(from.u64()?).ok()?;
                Self::Note(from.slice(length)?.to_vec())
            }
            REPLY => {
                let (status, code) = (from.u32()?, from.u32()?);
                let reply = match status {
                    0 => Reply::Done(Route::from_word(code)?),
                    1 => Reply::Cancelled,
                    2 => Reply::NoRegion,
                    3 => Reply::Outside,
                    4 => Reply::NoSource,
                    5 => Reply::Kernel(code.cast_signed()),
                    6 => Reply::NoAccess,
                    _ => return None,
                };
                Self::Reply { sequence, reply }
            }
            _ => return None,
        })
    }
}

fn write(sequence: u64, from: &mut Reader<'_>) -> Option<Write> {
    let mut counts = [0; 4];
    for count in &mut counts {
        *count = usize::try_from(from.u32()?).ok()?;
    }
    let [sources, targets, parts, note] = counts;
    // As many as there are bytes for: nothing is allocated on a peer's word.
    let least = sources.checked_mul(SOURCE)?.checked_add(targets.checked_mul(TARGET)?)?;
    if least.checked_add(parts.checked_mul(PART)?)? > from.0.len() {
        return None;
    }
    let mut write = Write { sequence, ..Write::default() };
    for _ in 0..sources {
        write.sources.push(Source { segment: from.u64()?, base: from.u64()?, bytes: from.u64()? });
    }
    for _ in 0..targets {
        let (slot, generation, secret) = (from.u32()?, from.u32()?, from.u64()?);
        write.targets.push(Target { slot, generation, secret });
    }
    let (parts, _) = from.slice(parts * PART)?.as_chunks::<PART>();
    write.parts = parts.iter().map(Part::decode).collect();
    if let Some(length) = note.checked_sub(1) {
        write.note = Some(from.slice(length)?.to_vec());
    }
    Some(write)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_record_comes_back_as_it_was() {
        let source = Source { segment: 1, base: 2, bytes: 3 };
        let target = Target { slot: 4, generation: 5, secret: 6 };
        let part =
            Part { source: 0, target: 0, source_offset: 7, target_offset: 8, bytes: 9 };
        for payload in [None, Some(vec![]), Some(vec![1, 2, 3])] {
            let write = Write {
                sequence: 77,
                sources: vec![source; 3],
                targets: vec![target; 2],
                parts: vec![part; 5],
                note: payload,
            };
            let bytes = write.encode();
            assert_eq!(bytes.len() % ALIGN, 0);
            assert_eq!(Header::of(*bytes.first_chunk().unwrap()).0, bytes.len());
            assert_eq!(Record::decode(&bytes), Some(Record::Write(write)));
            for cut in (0..bytes.len() - 8).step_by(8) {
                assert_eq!(Record::decode(&bytes[..cut]), None, "{cut} of {}", bytes.len());
            }
        }
        assert_eq!(Record::decode(&note(b"abc")), Some(Record::Note(b"abc".to_vec())));
        let ways = (0..4).filter_map(Route::from_word).map(Reply::Done);
        for one in ways.chain([Reply::Outside, Reply::Kernel(14), Reply::Kernel(-1)]) {
            let bytes = reply(9, one);
            assert_eq!(Record::decode(&bytes), Some(Record::Reply { sequence: 9, reply: one }));
        }
    }

    #[test]
    fn lengths_that_lie_are_refused_and_allocate_nothing() {
        let mut bytes = Write::default().encode();
        for at in [16, 20, 24, 28] {
            let mut lying = bytes.clone();
            lying[at..at + 4].copy_from_slice(&u32::MAX.to_le_bytes());
            assert_eq!(Record::decode(&lying), None, "at {at}");
        }
        bytes[4] = 99;
        assert_eq!(Record::decode(&bytes), None);
        let mut bytes = reply(9, Reply::Done(Route::default()));
        // A way that there is not.
        bytes[20] = 4;
        assert_eq!(Record::decode(&bytes), None);
    }
}
