//! A digest that is the same in every process, build and byte order, which the standard library's hashers are not.

/// Of 64 bits. Made for telling logs apart, not for security.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Digest(u64);

impl Digest {
    pub(crate) const START: Self = Self(0xcbf2_9ce4_8422_2325);

    /// Takes in a number.
    pub(crate) const fn number(&mut self, number: u64) {
        // A round of splitmix64 over the state and the number.
        let mut mixed = (self.0 ^ number).wrapping_add(0x9e37_79b9_7f4a_7c15);
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        self.0 = mixed ^ (mixed >> 31);
    }

    /// Takes in bytes and their number, eight at a time, the first the least significant.
    pub(crate) fn bytes(&mut self, bytes: &[u8]) {
        self.number(bytes.len() as u64);
        for chunk in bytes.chunks(8) {
            let word = chunk.iter().rev().fold(0, |word, byte| (word << 8) | u64::from(*byte));
            self.number(word);
        }
    }

    pub(crate) const fn value(self) -> u64 {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(bytes: &[u8]) -> u64 {
        let mut digest = Digest::START;
        digest.bytes(bytes);
        digest.value()
    }

    #[test]
    fn everything_counts() {
        let all = [of(b""), of(b"\0"), of(b"\0\0"), of(b"a"), of(b"12345678"), of(b"123456789")];
        let distinct: std::collections::BTreeSet<_> = all.into_iter().collect();
        assert_eq!(distinct.len(), all.len());
        let (mut one, mut other) = (Digest::START, Digest::START);
        one.number(1);
        one.number(2);
        other.number(2);
        other.number(1);
        assert_ne!(one.value(), other.value());
    }

    #[test]
    fn it_is_the_same_everywhere() {
        assert_eq!(of(b"the same in every process"), 0xb07b_1157_7808_7b31);
    }
}
