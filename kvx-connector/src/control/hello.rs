//! What each side says first once the session is encrypted: which versions it speaks, and who it is.
//!
//! The versions come before anything that could differ between them, at fixed places:
//!
//! | bytes | |
//! |---|---|
//! | 0..2, 2..4 | the oldest and the newest schema that it speaks |
//! | 4..12 | features that the other side must know, a bit each |
//! | 12..20 | features that it knows itself |
//! | 20.. | MessagePack: `engine`, `incarnation`, `rank` (nil: the engine's scheduler) |
//!
//! Numbers are little-endian. A field that is added later is passed over by whoever does not know it.

use kvx_core::card::{EngineName, FeatureSet, SchemaRange};
use kvx_core::id::Incarnation;
use kvx_core::layout::RankCoords;
use kvx_core::wire::{self, Text};
use kvx_core::{Error, Result};
use serde::{Deserialize, Serialize};

use super::{Agreed, RemoteIdentity, Versions};

/// Most bytes of a hello: what is there today takes a tenth.
pub(super) const MAX_BYTES: usize = 4096;
const FIXED: usize = 20;

/// A hello, read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Hello {
    pub(super) versions: Versions,
    pub(super) identity: RemoteIdentity,
}

#[derive(Serialize)]
struct BodyOut<'a> {
    engine: &'a str,
    incarnation: Incarnation,
    rank: Option<RankCoords>,
}

#[derive(Deserialize)]
struct BodyIn {
    engine: Text<{ EngineName::MAX_BYTES }>,
    incarnation: Incarnation,
    rank: Option<RankCoords>,
}

pub(super) fn write(versions: &Versions, identity: &RemoteIdentity) -> Result<Vec<u8>> {
    let mut bytes = Vec::with_capacity(256);
    for schema in [versions.schemas.oldest(), versions.schemas.newest()] {
        bytes.extend_from_slice(&schema.to_le_bytes());
    }
    for set in [versions.required, versions.known] {
        bytes.extend_from_slice(&set.bits().to_le_bytes());
    }
    let body = BodyOut {
        engine: identity.engine.as_str(),
        incarnation: identity.incarnation,
        rank: identity.rank,
    };
    bytes.extend_from_slice(&wire::to_bytes("control", &body)?);
    Ok(bytes)
}

/// What both speak, before anything else of the other side's hello is looked at; then who it is.
pub(super) fn read(mine: &Versions, bytes: &[u8]) -> Result<(Agreed, Hello)> {
    let cut =
        || Error::peer("control", "the hello is cut short").with_context("bytes", bytes.len());
    if bytes.len() > MAX_BYTES {
        return Err(Error::peer("control", "the hello is too long")
            .with_context("bytes", bytes.len())
            .with_context("limit", MAX_BYTES));
    }
    let (fixed, body) = bytes.split_first_chunk::<FIXED>().ok_or_else(cut)?;
    let [a, b, c, d, required @ .., _, _, _, _, _, _, _, _] = *fixed;
    let [.., k0, k1, k2, k3, k4, k5, k6, k7] = *fixed;
    let known = u64::from_le_bytes([k0, k1, k2, k3, k4, k5, k6, k7]);
    let (oldest, newest) = (u16::from_le_bytes([a, b]), u16::from_le_bytes([c, d]));
    let schemas = SchemaRange::new(oldest, newest).ok_or_else(|| {
        Error::peer("control", format!("schemas {oldest} to {newest} are no range"))
    })?;
    let theirs = Versions {
        schemas,
        required: FeatureSet::from_bits(u64::from_le_bytes(required)),
        known: FeatureSet::from_bits(known),
    };
    let agreed = mine.agree(&theirs)?;
    let body: BodyIn = wire::from_bytes("control", "the hello", body)?;
    let engine = EngineName::new(body.engine.into_string())
        .map_err(|error| Error::peer("control", error.message().to_owned()))?;
    if let Some(rank) = &body.rank {
        rank.check().map_err(|error| Error::peer("control", error.message().to_owned()))?;
    }
    let identity = RemoteIdentity { engine, incarnation: body.incarnation, rank: body.rank };
    Ok((agreed, Hello { versions: theirs, identity }))
}

#[cfg(test)]
mod tests {
    use kvx_core::ErrorKind;
    use kvx_core::layout::Grid;

    use super::*;

    fn versions(oldest: u16, newest: u16) -> Versions {
        Versions { schemas: SchemaRange::new(oldest, newest).unwrap(), ..Versions::CURRENT }
    }

    fn identity() -> RemoteIdentity {
        RemoteIdentity {
            engine: EngineName::new("decode-7").unwrap(),
            incarnation: Incarnation::from_bytes(*b"0123456789abcdef"),
            rank: Some(RankCoords { grid: Grid { tp: 4, pp: 2, dp: 1 }, tp: 3, pp: 1, dp: 0 }),
        }
    }

    /// What the first version says, byte for byte: later ones must go on reading it.
    const SCHEMA_1: &[u8] = b"\x01\x00\x01\x00\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\
        \x83\xa6engine\xa8decode-7\
        \xabincarnation\xdc\x00\x10\x30\x31\x32\x33\x34\x35\x36\x37\x38\x39abcdef\
        \xa4rank\x84\xa4grid\x83\xa2tp\x04\xa2pp\x02\xa2dp\x01\xa2tp\x03\xa2pp\x01\xa2dp\x00";

    #[test]
    fn the_first_version_says_these_bytes() {
        let said = write(&Versions::CURRENT, &identity()).unwrap();
        assert_eq!(said.escape_ascii().to_string(), SCHEMA_1.escape_ascii().to_string());
    }

    #[test]
    fn the_next_version_and_the_one_before_agree_on_what_both_speak() {
        // The next one reads what the first says.
        let (agreed, hello) = read(&versions(1, 2), SCHEMA_1).unwrap();
        assert_eq!(agreed.schema, 1);
        assert_eq!(hello.identity, identity());
        // And the first what the next one says, which has a field more and knows a feature more.
        let next = Versions { known: FeatureSet::from_bits(1 << 40), ..versions(1, 2) };
        let mut said = write(&next, &identity()).unwrap();
        said[FIXED] += 1;
        said.extend_from_slice(b"\xa5later\x92\x01\xa1x");
        let (agreed, hello) = read(&Versions::CURRENT, &said).unwrap();
        assert_eq!((agreed.schema, agreed.features), (1, FeatureSet::NONE));
        assert_eq!(hello.identity, identity());
        assert_eq!(hello.versions, next);
    }

    #[test]
    fn versions_without_a_common_schema_name_both_ranges() {
        let error = read(&versions(2, 3), SCHEMA_1).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        let mismatch = error.as_mismatch().unwrap();
        assert_eq!(mismatch.field, "schema");
        assert_eq!(
            (mismatch.left.1.as_str(), mismatch.right.1.as_str()),
            ("schemas 2 to 3", "schema 1")
        );
        // Whatever follows the versions is not looked at.
        let mut later = SCHEMA_1[..FIXED].to_vec();
        later.extend_from_slice(b"\xc1\xff");
        assert!(read(&versions(2, 3), &later).unwrap_err().as_mismatch().is_some());
    }

    #[test]
    fn a_feature_that_one_side_requires_and_the_other_does_not_know_is_named() {
        let bit = |bit: u32| FeatureSet::from_bits(1 << bit);
        let mine = Versions { required: bit(33), known: bit(33), ..Versions::CURRENT };
        let theirs = Versions { required: bit(34), known: bit(34), ..Versions::CURRENT };
        let error = mine.agree(&theirs).unwrap_err();
        let mismatch = error.as_mismatch().unwrap();
        assert_eq!(mismatch.field, "features");
        assert_eq!(mismatch.left, ("this side knows".into(), "33".into()));
        assert_eq!(mismatch.right, ("the peer requires".into(), "34".into()));
        let plain = Versions::CURRENT;
        let error = mine.agree(&plain).unwrap_err();
        let mismatch = error.as_mismatch().unwrap();
        assert_eq!(mismatch.left, ("this side requires".into(), "33".into()));
        assert_eq!(mismatch.right, ("the peer knows".into(), "none".into()));
        let both = Versions { required: bit(33), known: FeatureSet::from_bits(3 << 33), ..plain };
        assert_eq!(both.agree(&both).unwrap().features, both.known);
    }

    #[test]
    fn what_is_no_hello_is_refused() {
        let with = |at: usize, byte: u8| {
            let mut bytes = SCHEMA_1.to_vec();
            bytes[at] = byte;
            bytes
        };
        let mut outside = SCHEMA_1.to_vec();
        *outside.last_mut().unwrap() = 1;
        for (bytes, why) in [
            (SCHEMA_1[..FIXED - 1].to_vec(), "cut short"),
            (SCHEMA_1[..FIXED].to_vec(), "malformed"),
            (SCHEMA_1[..SCHEMA_1.len() - 1].to_vec(), "malformed"),
            ([SCHEMA_1, b"\0"].concat(), "followed by other bytes"),
            (vec![0; MAX_BYTES + 1], "too long"),
            (with(0, 0), "no range"),
            (with(0, 2), "no range"),
            (with(30, b'\n'), "control character"),
            (outside, "outside its grid"),
        ] {
            let error = read(&Versions::CURRENT, &bytes).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Peer, "{error}");
            assert!(error.message().contains(why), "{error} does not say {why:?}");
        }
    }
}
