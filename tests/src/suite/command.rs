//! What a side can be told to do, and what it answers: the same whether it is in this process or in another.

use kvx_core::capability::{Capabilities, Ordering, Revoke};
use kvx_core::id::{PeerId, RegionId, RemoteRegionId};
use kvx_core::transfer::{Mode, PostedSegment};
use kvx_core::{Error, ErrorKind, Retry};
use serde::{Deserialize, Serialize};

/// One call.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) enum Command {
    Name,
    Capabilities,
    Incarnation,
    Arena {
        bytes: u64,
        seed: u64,
    },
    /// An arena of zeros that nobody touches, so that a large one costs little.
    Untouched {
        bytes: u64,
    },
    /// An arena of memory that the backend allocates, left as it came.
    Allocate {
        bytes: u64,
    },
    Register {
        arena: u64,
        offset: u64,
        bytes: u64,
    },
    RegisterForeign {
        arena: u64,
    },
    Deregister(#[serde(with = "handle")] RegionId),
    KeyBlob(#[serde(with = "handle")] RegionId),
    ImportKey(#[serde(with = "handle")] PeerId, Vec<u8>),
    ReleaseKey(#[serde(with = "handle")] PeerId, #[serde(with = "handle")] RemoteRegionId),
    Offer,
    Accept(Vec<u8>),
    Complete(Vec<u8>),
    Finish(Vec<u8>),
    Connect(#[serde(with = "handle")] PeerId),
    Submit(Post),
    Poll {
        room: u32,
    },
    Cancel(u64),
    Sever(#[serde(with = "handle")] PeerId),
    Revoke(#[serde(with = "handle")] PeerId),
    PeerInfo(#[serde(with = "handle")] PeerId),
    Close,
    Drop,
    Read {
        arena: u64,
        offset: u64,
        bytes: u64,
    },
    Write {
        arena: u64,
        offset: u64,
        #[serde(with = "binary")]
        bytes: Vec<u8>,
    },
    Held {
        arena: u64,
    },
}

/// A batch to post.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Post {
    pub(crate) id: u64,
    #[serde(with = "handle")]
    pub(crate) peer: PeerId,
    pub(crate) mode: Mode,
    pub(crate) segments: Vec<Piece>,
    pub(crate) notify: Option<Vec<u8>>,
}

/// A segment.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct Piece {
    #[serde(with = "handle")]
    local: RegionId,
    #[serde(with = "handle")]
    remote: RemoteRegionId,
    local_offset: u64,
    remote_offset: u64,
    bytes: u64,
}

impl From<PostedSegment> for Piece {
    fn from(segment: PostedSegment) -> Self {
        let PostedSegment { local, remote, local_offset, remote_offset, bytes } = segment;
        Self { local, remote, local_offset, remote_offset, bytes }
    }
}

impl From<Piece> for PostedSegment {
    fn from(piece: Piece) -> Self {
        let Piece { local, remote, local_offset, remote_offset, bytes } = piece;
        Self { local, remote, local_offset, remote_offset, bytes }
    }
}

/// What came of a call.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) enum Answer {
    Nothing,
    Number(u64),
    Text(String),
    Bytes(#[serde(with = "binary")] Vec<u8>),
    Region(#[serde(with = "handle")] RegionId),
    Remote(#[serde(with = "handle")] RemoteRegionId),
    Peer(#[serde(with = "handle")] PeerId),
    Met(#[serde(with = "handle")] PeerId, Vec<u8>),
    Posted(Posted),
    Events(Vec<Seen>),
    Claims(Box<Stated>),
}

/// What a backend said to a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Posted {
    Full,
    Submitted,
    Done,
}

/// An event.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) enum Seen {
    Settled {
        id: u64,
        end: End,
    },
    Notified {
        #[serde(with = "handle")]
        peer: PeerId,
        payload: Vec<u8>,
    },
    PeerDown {
        #[serde(with = "handle")]
        peer: PeerId,
        error: Option<Refusal>,
    },
}

/// How a transfer ended.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) enum End {
    Done,
    Cancelled,
    Failed(Refusal),
}

/// A backend's error.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Refusal {
    pub(crate) kind: ErrorKind,
    /// Whether it says that connecting again may help.
    pub(crate) reconnect: bool,
    pub(crate) text: String,
}

impl From<Error> for Refusal {
    fn from(error: Error) -> Self {
        Self {
            kind: error.kind(),
            reconnect: error.retry() == Retry::Reconnect,
            text: error.to_string(),
        }
    }
}

/// [`Capabilities`], as they cross to another process.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Stated {
    flags: [bool; 6],
    max_segment_bytes: u64,
    max_batch_segments: u32,
    max_notification_bytes: u32,
    max_in_flight: u32,
    per_peer_order: bool,
    revoke: u8,
}

impl From<&Capabilities> for Stated {
    fn from(of: &Capabilities) -> Self {
        Self {
            flags: [
                of.read,
                of.write,
                of.host_memory,
                of.cuda_memory,
                of.native_notification,
                of.event_fd,
            ],
            max_segment_bytes: of.limits.max_segment_bytes,
            max_batch_segments: of.limits.max_batch_segments,
            max_notification_bytes: of.limits.max_notification_bytes,
            max_in_flight: of.limits.max_in_flight,
            per_peer_order: of.ordering == Ordering::PerPeer,
            revoke: match of.revoke {
                Revoke::PerPeer => 1,
                Revoke::PerRegion => 2,
                _ => 0,
            },
        }
    }
}

impl From<&Stated> for Capabilities {
    fn from(stated: &Stated) -> Self {
        let mut of = Self::none();
        [of.read, of.write, of.host_memory, of.cuda_memory, of.native_notification, of.event_fd] =
            stated.flags;
        of.limits.max_segment_bytes = stated.max_segment_bytes;
        of.limits.max_batch_segments = stated.max_batch_segments;
        of.limits.max_notification_bytes = stated.max_notification_bytes;
        of.limits.max_in_flight = stated.max_in_flight;
        if stated.per_peer_order {
            of.ordering = Ordering::PerPeer;
        }
        of.revoke = match stated.revoke {
            1 => Revoke::PerPeer,
            2 => Revoke::PerRegion,
            _ => Revoke::None,
        };
        of
    }
}

/// A handle as slot and generation.
mod handle {
    use kvx_core::id::{PeerId, RegionId, RemoteRegionId};
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    pub(super) trait Handle: Copy {
        fn parts(self) -> (u32, u32);
        fn make(slot: u32, generation: u32) -> Self;
    }

    macro_rules! handle {
        ($($name:ident)*) => {$(
            impl Handle for $name {
                fn parts(self) -> (u32, u32) {
                    (self.slot(), self.generation())
                }

                fn make(slot: u32, generation: u32) -> Self {
                    Self::new(slot, generation)
                }
            }
        )*};
    }
    handle!(PeerId RegionId RemoteRegionId);

    pub(super) fn serialize<H: Handle, S: Serializer>(of: &H, to: S) -> Result<S::Ok, S::Error> {
        of.parts().serialize(to)
    }

    pub(super) fn deserialize<'de, H: Handle, D: Deserializer<'de>>(
        from: D,
    ) -> Result<H, D::Error> {
        let (slot, generation) = Deserialize::deserialize(from)?;
        Ok(H::make(slot, generation))
    }
}

/// Bytes as such, not as a list of numbers: memories are compared whole.
mod binary {
    use std::fmt;

    use serde::de::{Error, Visitor};
    use serde::{Deserializer, Serializer};

    pub(super) fn serialize<S: Serializer>(of: &[u8], to: S) -> Result<S::Ok, S::Error> {
        to.serialize_bytes(of)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<u8>, D::Error> {
        from.deserialize_byte_buf(Bytes)
    }

    struct Bytes;

    impl Visitor<'_> for Bytes {
        type Value = Vec<u8>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("bytes")
        }

        fn visit_bytes<E: Error>(self, bytes: &[u8]) -> Result<Vec<u8>, E> {
            Ok(bytes.to_vec())
        }

        fn visit_byte_buf<E: Error>(self, bytes: Vec<u8>) -> Result<Vec<u8>, E> {
            Ok(bytes)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_crosses_comes_back_as_it_was() {
        let mut capabilities = Capabilities::none();
        capabilities.read = true;
        capabilities.event_fd = true;
        capabilities.limits.max_in_flight = 7;
        capabilities.ordering = Ordering::PerPeer;
        capabilities.revoke = Revoke::PerRegion;
        let event = Seen::PeerDown {
            peer: PeerId::new(3, 4),
            error: Some(Error::peer("test", "gone").with_retry(Retry::Reconnect).into()),
        };
        let sent = (Answer::Claims(Box::new((&capabilities).into())), Answer::Events(vec![event]));
        let bytes = rmp_serde::to_vec(&sent).unwrap();
        let (claims, events): (Answer, Answer) = rmp_serde::from_slice(&bytes).unwrap();
        let Answer::Claims(stated) = claims else { panic!("{claims:?}") };
        assert_eq!(Capabilities::from(&*stated), capabilities);
        let Answer::Events(events) = events else { panic!("{events:?}") };
        let [Seen::PeerDown { peer, error: Some(error) }] = &events[..] else {
            panic!("{events:?}")
        };
        assert_eq!(*peer, PeerId::new(3, 4));
        assert_eq!((error.kind, error.reconnect), (ErrorKind::Peer, true));
    }
}
