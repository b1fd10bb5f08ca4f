//! Messages between two backends: notifications, acknowledgements of them, and the end of a connection. Never data.

use crate::sys::HEADER;

const MAGIC: u32 = 0x7863_756b;

/// Most numbers of one acknowledgement.
pub(crate) const MOST_NUMBERS: usize = crate::sys::MOST_PAYLOAD / 8;

/// What a message is. Its payload: the notification's bytes, the numbers of notifications that were taken, or
/// nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Note = 1,
    Taken = 2,
    Bye = 3,
    /// The first of a connection: once it was sent, there is one.
    Hello = 4,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Header {
    pub(crate) kind: Kind,
    /// The receiver's word for the connection: nobody else knows it.
    pub(crate) word: u64,
    /// The sender's word: the receiver may answer before the handshake told it.
    pub(crate) from: u64,
    /// The notification's, for the acknowledgement.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_come_back_and_others_are_refused() {
        for kind in [Kind::Note, Kind::Taken, Kind::Bye, Kind::Hello] {
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
}
