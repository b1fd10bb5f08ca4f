//! What the side that dials says first: 12 bytes, by which each knows what the other speaks.

use kvx_core::{Error, Result};

use super::super::Security;
use super::{Fault, FaultKind};

const MAGIC: [u8; 8] = *b"KVX ctrl";
/// Version of what stands before the hello. Changes only when the two could not even find each other's hello any more.
const VERSION: u8 = 1;
/// Magic, version, whether there is a key, two of zero.
pub(super) const PREAMBLE_BYTES: usize = 12;

pub(super) fn write(security: &Security) -> [u8; PREAMBLE_BYTES] {
    let [a, b, c, d, e, f, g, h] = MAGIC;
    [a, b, c, d, e, f, g, h, VERSION, u8::from(!security.keys().is_empty()), 0, 0]
}

/// The preamble, once it is all there; nothing of it may be wrong before.
pub(super) fn begins_well(bytes: &[u8]) -> Result<[u8; PREAMBLE_BYTES], Fault> {
    let fault = |error| Fault { kind: FaultKind::NotOurs, error };
    let begins = &bytes[..bytes.len().min(MAGIC.len())];
    if !MAGIC.starts_with(begins) {
        return Err(fault(Error::peer(
            "control",
            format!("no kvx: it begins with {:?}", begins.escape_ascii().to_string()),
        )));
    }
    if let Some(version) = bytes.get(MAGIC.len())
        && *version != VERSION
    {
        return Err(fault(
            Error::mismatch_between(
                "control",
                "preamble",
                ("this side", format!("version {VERSION}")),
                ("the peer", format!("version {version}")),
            )
            .with_remedy("run versions of kvx that can talk to each other"),
        ));
    }
    Ok(bytes.first_chunk::<PREAMBLE_BYTES>().copied().unwrap_or_default())
}
