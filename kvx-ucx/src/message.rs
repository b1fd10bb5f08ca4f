//! Messages between two backends: notifications, acknowledgements of them, lists of what is to be moved, and the end of a connection.
//! Never data.

use crate::sys::HEADER;

const MAGIC: u32 = 0x7863_756b;

/// Most numbers of one acknowledgement.
pub(crate) const MOST_NUMBERS: usize = crate::sys::MOST_PAYLOAD / 8;

/// Most ranges of one list: it goes in one piece over every transport.
pub(crate) const MOST_RANGES: u32 = 80;

/// Bytes of a range in a list.
pub(crate) const RANGE: usize = 24;

const _: () = assert!(MOST_RANGES as usize * RANGE <= crate::sys::MOST_PAYLOAD, "a list is one message");

/// What a message is. Its payload: the notification's bytes, the numbers of notifications that were taken, ranges, a refusal, or
/// nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Note = 1,
    Taken = 2,
    Bye = 3,
    /// The first of a connection: once it was sent, there is one.
    Hello = 4,
    /// The sender asks for these ranges of the receiver's memory, under tags in a row.
    Ask = 5,
    /// The sender sends what is to be written to these ranges, under tags in a row.
    Offer = 6,
    /// All of an offer is where it belongs.
    Landed = 7,
    /// Nothing comes of what was asked for, or sent.
    Refused = 8,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Header {
    pub(crate) kind: Kind,
    /// The receiver's word for the connection: nobody else knows it.
    pub(crate) word: u64,
    /// The sender's word: the receiver may answer before the handshake told it.
    pub(crate) from: u64,
    /// The notification's, for the acknowledgement; the first tag of a list.
    pub(crate) number: u64,
}

impl Header {
    pub(crate) fn encode(self) -> [u8; HEADER] {
        let mut bytes = [0; HEADER];
        bytes[..4].copy_from_slice(&MAGIC.to_le_bytes());
        bytes[4..8].copy_from_slice(&(self.kind as u32).to_le_bytes());
        bytes[8..16].copy_from_slice(&self.word.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.from.to_le_bytes());
        bytes[24..].copy_from_slice(&self.number.to_le_bytes());
        bytes
    }

    pub(crate) fn decode(bytes: &[u8; HEADER]) -> Option<Self> {
        let half = |at: usize| u32::from_le_bytes(std::array::from_fn(|i| bytes[at + i]));
        let word = |at: usize| u64::from_le_bytes(std::array::from_fn(|i| bytes[at + i]));
        if half(0) != MAGIC {
            return None;
        }
        let kind = match half(4) {
            1 => Kind::Note,
            2 => Kind::Taken,
            3 => Kind::Bye,
            4 => Kind::Hello,
            5 => Kind::Ask,
            6 => Kind::Offer,
            7 => Kind::Landed,
            8 => Kind::Refused,
            _ => return None,
        };
        Some(Self { kind, word: word(8), from: word(16), number: word(24) })
    }
}

pub(crate) fn numbers(list: &[u64]) -> Vec<u8> {
    list.iter().flat_map(|number| number.to_le_bytes()).collect()
}

pub(crate) fn read_numbers(payload: &[u8]) -> impl Iterator<Item = u64> + '_ {
    payload.as_chunks::<8>().0.iter().map(|number| u64::from_le_bytes(*number))
}

/// A range of a region of the receiver's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Range {
    /// Slot and generation of the region's number.
    pub(crate) region: (u32, u32),
    pub(crate) offset: u64,
    pub(crate) bytes: u64,
}

impl Range {
    pub(crate) fn encode(&self, into: &mut Vec<u8>) {
        into.extend(self.region.0.to_le_bytes());
        into.extend(self.region.1.to_le_bytes());
        into.extend(self.offset.to_le_bytes());
        into.extend(self.bytes.to_le_bytes());
    }
}

/// Reads a list: at least one range, and not too many.
pub(crate) fn read_ranges(payload: &[u8]) -> Option<Vec<Range>> {
    let (ranges, rest) = payload.as_chunks::<RANGE>();
    if !rest.is_empty() || !(1..=MOST_RANGES as usize).contains(&ranges.len()) {
        return None;
    }
    let read = |bytes: &[u8; RANGE]| {
        let half = |at: usize| u32::from_le_bytes(std::array::from_fn(|i| bytes[at + i]));
        let word = |at: usize| u64::from_le_bytes(std::array::from_fn(|i| bytes[at + i]));
        Range { region: (half(0), half(4)), offset: word(8), bytes: word(16) }
    };
    Some(ranges.iter().map(read).collect())
}

/// Why nothing comes of a list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// There is no such region, or no more.
    Region = 1,
    /// A range is not in its region.
    Outside = 2,
    /// The region is not the host's memory.
    Kind = 3,
    /// UCX failed.
    Failed = 4,
}

impl Refusal {
    /// With how many ranges the list had.
    pub(crate) fn encode(self, count: u64) -> Vec<u8> {
        numbers(&[self as u64, count])
    }

    /// A refusal, and of how many ranges. One that is not known is a failure.
    pub(crate) fn decode(payload: &[u8]) -> (Self, u64) {
        let mut numbers = read_numbers(payload);
        let refusal = match numbers.next() {
            Some(1) => Self::Region,
            Some(2) => Self::Outside,
            Some(3) => Self::Kind,
            _ => Self::Failed,
        };
        (refusal, numbers.next().unwrap_or(0).min(MOST_RANGES.into()))
    }

    pub(crate) const fn words(self) -> &'static str {
        match self {
            Self::Region => "the peer has no such region, or no more",
            Self::Outside => "a segment is outside the peer's region",
            Self::Kind => "the peer's region is not the host's memory",
            Self::Failed => "the peer could not move it",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_come_back_and_others_are_refused() {
        let lists = [Kind::Ask, Kind::Offer, Kind::Landed, Kind::Refused];
        for kind in [Kind::Note, Kind::Taken, Kind::Bye, Kind::Hello].into_iter().chain(lists) {
            let header = Header { kind, word: 7 << 40, from: 5, number: u64::MAX - 3 };
            assert_eq!(Header::decode(&header.encode()), Some(header));
        }
        let mut wrong = Header { kind: Kind::Note, word: 1, from: 3, number: 2 }.encode();
        wrong[4] = 9;
        assert_eq!(Header::decode(&wrong), None);
        assert_eq!(Header::decode(&[0; HEADER]), None);
        assert_eq!(read_numbers(&numbers(&[1, u64::MAX])).collect::<Vec<_>>(), [1, u64::MAX]);
        assert_eq!(read_numbers(&[0; 7]).count(), 0);
    }

    #[test]
    fn lists_come_back_and_others_are_refused() {
        let range = |at: u64| Range { region: (7, 9), offset: at << 33, bytes: at + 1 };
        let list: Vec<Range> = (0..u64::from(MOST_RANGES)).map(range).collect();
        let mut bytes = Vec::new();
        list.iter().for_each(|range| range.encode(&mut bytes));
        assert_eq!(read_ranges(&bytes), Some(list));
        assert_eq!(read_ranges(&bytes[..RANGE]).map(|list| list.len()), Some(1));
        assert_eq!(read_ranges(&[]), None);
        assert_eq!(read_ranges(&bytes[1..]), None);
        bytes.extend([0; RANGE]);
        assert_eq!(read_ranges(&bytes), None, "one too many");
        for refusal in [Refusal::Region, Refusal::Outside, Refusal::Kind, Refusal::Failed] {
            assert_eq!(Refusal::decode(&refusal.encode(5)), (refusal, 5));
        }
        assert_eq!(Refusal::decode(&[9; 16]), (Refusal::Failed, u64::from(MOST_RANGES)));
        assert_eq!(Refusal::decode(&[]), (Refusal::Failed, 0));
    }
}
