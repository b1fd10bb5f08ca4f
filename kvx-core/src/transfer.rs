//! What is moved: segments, batches and the mode.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::Error;
use crate::id::{RegionId, RemoteRegionId};

/// Direction of a transfer, seen from its initiator.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Mode {
    /// From the peer's memory into mine.
    Read,
    /// From my memory into the peer's.
    Write,
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Read => "read",
            Self::Write => "write",
        })
    }
}

impl FromStr for Mode {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        match text {
            "read" => Ok(Self::Read),
            "write" => Ok(Self::Write),
            _ => Err(Error::config("mode", format!("unknown mode {text:?}"))
                .with_remedy("use read or write")),
        }
    }
}

/// One contiguous piece of a transfer, in terms of two layouts: regions are indices into
/// [`RankLayout::regions`](crate::layout::RankLayout::regions) of the initiator (local) and its peer (remote).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Segment {
    /// Region of the initiator's layout.
    pub local_region: u32,
    /// Region of the peer's layout.
    pub remote_region: u32,
    /// Byte offset in the local region.
    pub local_offset: u64,
    /// Byte offset in the remote region.
    pub remote_offset: u64,
    /// Bytes. Never zero.
    pub bytes: u64,
}

/// One contiguous piece of a posted batch: like [`Segment`], with a backend's handles in place of indices.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PostedSegment {
    /// Registered region of the initiator.
    pub local: RegionId,
    /// Imported region of the peer.
    pub remote: RemoteRegionId,
    /// Byte offset in the local region.
    pub local_offset: u64,
    /// Byte offset in the remote region.
    pub remote_offset: u64,
    /// Bytes. Never zero.
    pub bytes: u64,
}
