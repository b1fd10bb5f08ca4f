//! What becomes of a card on its way through bad hands.

use super::samples::{BODY_BYTES, ENVELOPE, HEAD_BYTES, length_at};

/// Numbers that look random and follow from a seed.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    /// SplitMix64.
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub(crate) fn below(&mut self, bound: usize) -> usize {
        usize::try_from(self.next() % bound as u64).unwrap()
    }

    pub(crate) fn byte(&mut self) -> u8 {
        self.next().to_le_bytes()[0]
    }
}

/// Makes the envelope's lengths those of what is there, so that a wrong length is not all that is ever found.
pub(crate) fn fit(bytes: &mut [u8]) {
    let Some(rest) = bytes.len().checked_sub(ENVELOPE) else { return };
    let rest = u32::try_from(rest).unwrap();
    let head = length_at(bytes, HEAD_BYTES).min(rest);
    bytes[HEAD_BYTES..BODY_BYTES].copy_from_slice(&head.to_le_bytes());
    bytes[BODY_BYTES..ENVELOPE].copy_from_slice(&(rest - head).to_le_bytes());
}

/// One to four changes.
pub(crate) fn mutate(random: &mut Random, bytes: &mut Vec<u8>, others: &[Vec<u8>]) {
    for _ in 0..=random.below(4) {
        change(random, bytes, others);
        if bytes.is_empty() {
            bytes.push(random.byte());
        }
    }
    if random.below(4) > 0 {
        fit(bytes);
    }
}

fn change(random: &mut Random, bytes: &mut Vec<u8>, others: &[Vec<u8>]) {
    // First bytes of MessagePack values, the large ones above all.
    const MARKERS: [u8; 12] =
        [0x80, 0x8f, 0x90, 0x9f, 0xc0, 0xc6, 0xc9, 0xcf, 0xdb, 0xdd, 0xdf, 0xff];
    // Numbers, lists, maps, texts and bytes of four or eight bytes of length.
    const LENGTHS: [u8; 7] = [0xc6, 0xce, 0xcf, 0xd3, 0xdb, 0xdd, 0xdf];
    let at = random.below(bytes.len());
    let length = random.below(9).min(bytes.len() - at);
    match random.below(12) {
        0 => bytes[at] ^= 1 << random.below(8),
        1 => bytes[at] = random.byte(),
        2 => bytes[at] = MARKERS[random.below(MARKERS.len())],
        3 => bytes[at..at + length].fill(0xff),
        4 => drop(bytes.drain(at..at + length)),
        5 => {
            let new: Vec<u8> = (0..length).map(|_| random.byte()).collect();
            bytes.splice(at..at, new);
        }
        // A piece of another card.
        6 => {
            let other = &others[random.below(others.len())];
            let from = random.below(other.len());
            let length = random.below(200).min(other.len() - from);
            bytes.splice(at..at, other[from..from + length].iter().copied());
        }
        // A piece of its own once more.
        7 => {
            let to = at + random.below(bytes.len() - at);
            let part = bytes[at..to].to_vec();
            bytes.splice(at..at, part);
        }
        8 => bytes.truncate(at),
        // The start of one card and the end of another.
        9 => {
            let other = &others[random.below(others.len())];
            bytes.truncate(at);
            bytes.extend_from_slice(&other[random.below(other.len())..]);
        }
        // A value that says that it is long, or a number that is large.
        10 => {
            let mut blown = vec![LENGTHS[random.below(LENGTHS.len())]];
            blown.extend((0..8).map(|_| if random.below(3) > 0 { 0xff } else { random.byte() }));
            let end = bytes.len().min(at + blown.len());
            bytes.splice(at..end, blown);
        }
        // Lists or maps in each other.
        _ => {
            let marker = [0x91, 0x81, 0xdd, 0xdf][random.below(4)];
            let depth = 1 << random.below(8);
            bytes.splice(at..at, std::iter::repeat_n(marker, depth));
        }
    }
}
