//! What two engines tell each other over their socket: things that need a descriptor, questions about regions, and that
//! there is something in the ring.

use crate::bytes::{Reader, Writer};
use crate::sys::socket::FRAME;

/// One message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Message {
    /// The first of each side. Brings three descriptors: the sender's page for this connection, its table, and its door.
    Hello(Hello),
    /// The sender has put something into its ring, or taken something out of the receiver's.
    Bell,
    /// Where is the region of which the sender has a key?
    Locate {
        /// The asker's name of the question.
        token: u64,
        slot: u32,
        generation: u32,
        secret: u64,
    },
    /// The answer. Memory that has a descriptor was sent before.
    Located { token: u64, answer: Answer },
    /// Memory of the sender's, for the receiver to read. Brings its descriptor.
    Segment { segment: u64 },
    /// The sender has no more use for that memory.
    Forget { segment: u64 },
    /// In place of a greeting: the sender does not take the connection.
    Refused(Refused),
}

/// Who is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Refused {
    pub(crate) from: [u8; 16],
    pub(crate) to: [u8; 16],
    /// The receiver's word for the connection, from the handshake.
    pub(crate) word: u64,
    pub(crate) why: Turned,
}

/// Why somebody is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Turned {
    /// The sender's policy does not let the receiver's user in, which is this one, as the sender sees it.
    User(u32),
    /// The sender's system does not give it what a connection takes: its error number.
    System(i32),
}

/// Who is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Hello {
    pub(crate) from: [u8; 16],
    pub(crate) to: [u8; 16],
    /// The receiver's word for the connection, from the handshake.
    pub(crate) word: u64,
    /// The sender's word.
    pub(crate) own_word: u64,
    /// Eight bytes of the sender's memory, to see whether it can be read from outside.
    pub(crate) probe: Probe,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Probe {
    pub(crate) address: u64,
    pub(crate) value: u64,
}

/// Where a region is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Answer {
    /// There is no such region, or the key is wrong.
    Nowhere,
    /// `bytes` bytes from `base` of memory that has a descriptor.
    Shared { segment: u64, base: u64, bytes: u64 },
    /// `bytes` bytes from `address` of the process.
    Borrowed { address: u64, bytes: u64 },
}

impl Message {
    /// How many descriptors it brings.
    pub(crate) const fn descriptors(&self) -> usize {
        match self {
            Self::Hello(_) => 3,
            Self::Segment { .. } => 1,
            _ => 0,
        }
    }

    pub(crate) fn encode(&self) -> [u8; FRAME] {
        let mut to = Writer::default();
        match *self {
            Self::Hello(Hello { from, to: whom, word, own_word, probe }) => {
                to.u64(1).bytes(&from).bytes(&whom).u64(word).u64(own_word);
                to.u64(probe.address).u64(probe.value);
            }
            Self::Bell => {
                to.u64(2);
            }
            Self::Locate { token, slot, generation, secret } => {
                to.u64(3).u64(token).u32(slot).u32(generation).u64(secret);
            }
            Self::Located { token, answer } => {
                to.u64(4).u64(token);
                match answer {
                    Answer::Nowhere => to.u64(0),
                    Answer::Shared { segment, base, bytes } => {
                        to.u64(1).u64(segment).u64(base).u64(bytes)
                    }
                    Answer::Borrowed { address, bytes } => to.u64(2).u64(address).u64(bytes),
                };
            }
            Self::Segment { segment } => {
                to.u64(5).u64(segment);
            }
            Self::Forget { segment } => {
                to.u64(6).u64(segment);
            }
            Self::Refused(Refused { from, to: whom, word, why }) => {
                let (kind, value) = match why {
                    Turned::User(user) => (7, user),
                    Turned::System(number) => (8, number.cast_unsigned()),
                };
                to.u64(kind).bytes(&from).bytes(&whom).u64(word).u32(value);
            }
        }
        let mut frame = [0; FRAME];
        frame[..to.0.len()].copy_from_slice(&to.0);
        frame
    }

    pub(crate) fn decode(frame: &[u8; FRAME]) -> Option<Self> {
        let mut from = Reader(frame);
        Some(match from.u64()? {
            1 => Self::Hello(Hello {
                from: from.array()?,
                to: from.array()?,
                word: from.u64()?,
                own_word: from.u64()?,
                probe: Probe { address: from.u64()?, value: from.u64()? },
            }),
            2 => Self::Bell,
            3 => Self::Locate {
                token: from.u64()?,
                slot: from.u32()?,
                generation: from.u32()?,
                secret: from.u64()?,
            },
            4 => Self::Located {
                token: from.u64()?,
                answer: match from.u64()? {
                    0 => Answer::Nowhere,
                    1 => Answer::Shared {
                        segment: from.u64()?,
                        base: from.u64()?,
                        bytes: from.u64()?,
                    },
                    2 => Answer::Borrowed { address: from.u64()?, bytes: from.u64()? },
                    _ => return None,
                },
            },
            5 => Self::Segment { segment: from.u64()? },
            6 => Self::Forget { segment: from.u64()? },
            kind @ (7 | 8) => Self::Refused(Refused {
                from: from.array()?,
                to: from.array()?,
                word: from.u64()?,
                why: match (kind, from.u32()?) {
                    (7, user) => Turned::User(user),
                    (_, number) => Turned::System(number.cast_signed()),
                },
            }),
            _ => return None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_message_comes_back_as_it_was() {
        let probe = Probe { address: 5, value: 6 };
        let hello = Hello { from: [1; 16], to: [2; 16], word: 3, own_word: 4, probe };
        let answers = [
            Answer::Nowhere,
            Answer::Shared { segment: 1, base: 2, bytes: 3 },
            Answer::Borrowed { address: u64::MAX, bytes: 3 },
        ];
        let mut all = vec![
            Message::Hello(hello),
            Message::Bell,
            Message::Locate { token: 1, slot: 2, generation: 3, secret: 4 },
            Message::Segment { segment: 7 },
            Message::Forget { segment: 7 },
        ];
        let refused = |why| Message::Refused(Refused { from: [1; 16], to: [2; 16], word: 3, why });
        all.extend([Turned::User(4), Turned::System(24), Turned::System(-1)].map(refused));
        all.extend(answers.map(|answer| Message::Located { token: 9, answer }));
        for message in all {
            assert_eq!(Message::decode(&message.encode()), Some(message));
        }
        assert_eq!(Message::decode(&[0; FRAME]), None);
        assert_eq!(Message::decode(&[0xff; FRAME]), None);
    }
}
