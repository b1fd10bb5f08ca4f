//! How values of this crate look on the wire: named fields, and errors that name the field.

use std::fmt;
use std::marker::PhantomData;
use std::ops::Range;
use std::str::FromStr;
use std::time::Duration;

use kvx_core::id::Incarnation;
use kvx_core::wire::{self, Text};
use serde::de::{Error as _, MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serializer};

use crate::protocol::LeaseName;

/// The form of a value on the wire, where it is not that of the value itself.
pub(crate) trait Form: Sized {
    /// What it stands for.
    type Value;

    /// What it stands for.
    fn value(self) -> Self::Value;
}

/// Values that are their own form.
macro_rules! own_form {
    ($($name:ty),+ $(,)?) => {
        $(impl $crate::form::Form for $name {
            type Value = Self;

            fn value(self) -> Self {
                self
            }
        })+
    };
}
pub(crate) use own_form;

own_form!(
    bool,
    u16,
    u32,
    u64,
    crate::protocol::Fingerprint,
    crate::protocol::TransferKey,
    kvx_core::layout::GroupKind,
    Incarnation
);

/// Reads a struct from a map of named fields: in any order, each at most once, unknown ones passed over, one that is missing
/// taken from its default where it has one. Every error says in which field it is.
macro_rules! named_fields {
    ($name:ident { $($field:ident: $form:ty $(= $default:expr)?),+ $(,)? }) => {
        impl<'de> serde::Deserialize<'de> for $name {
            fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                struct Fields;

                impl<'de> serde::de::Visitor<'de> for Fields {
                    type Value = $name;

                    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                        f.write_str("a map of named fields")
                    }

                    fn visit_map<A: serde::de::MapAccess<'de>>(
                        self,
                        mut map: A,
                    ) -> Result<Self::Value, A::Error> {
                        use $crate::form::{Form, Key, take};
                        $(let mut $field: Option<$form> = None;)+
                        while let Some(Key(key)) = map.next_key()? {
                            match key.as_str() {
                                $(stringify!($field) => {
                                    take(stringify!($field), &mut $field, &mut map)?;
                                })+
                                _ => {
                                    map.next_value::<serde::de::IgnoredAny>()?;
                                }
                            }
                        }
                        Ok($name {
                            $($field: match $field {
                                Some(form) => form.value(),
                                None => $crate::form::named_fields!(@missing $field $(, $default)?),
                            }),+
                        })
                    }
                }

                deserializer.deserialize_map(Fields)
            }
        }

        $crate::form::own_form!($name);
    };
    (@missing $field:ident) => {
        return Err(serde::de::Error::missing_field(stringify!($field)))
    };
    (@missing $field:ident, $default:expr) => {
        $default
    };
}
pub(crate) use named_fields;

/// A field's name; empty where it is longer than any that there is.
pub(crate) struct Key(pub(crate) String);

impl<'de> Deserialize<'de> for Key {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Name;

        impl Visitor<'_> for Name {
            type Value = Key;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a field's name")
            }

            fn visit_str<E>(self, name: &str) -> Result<Key, E> {
                Ok(Key(if name.len() > 64 { String::new() } else { name.to_owned() }))
            }
        }

        deserializer.deserialize_str(Name)
    }
}

/// Reads the field `name` into `slot`.
pub(crate) fn take<'de, T: Deserialize<'de>, A: MapAccess<'de>>(
    name: &str,
    slot: &mut Option<T>,
    map: &mut A,
) -> Result<(), A::Error> {
    if slot.is_some() {
        return Err(A::Error::custom(format_args!("{name} is there twice")));
    }
    let value = map.next_value().map_err(|why| A::Error::custom(format_args!("{name}: {why}")))?;
    *slot = Some(value);
    Ok(())
}

/// A list of at most `MAX`.
pub(crate) struct List<T, const MAX: usize>(Vec<T>);

impl<'de, T: Deserialize<'de>, const MAX: usize> Deserialize<'de> for List<T, MAX> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        wire::list::<_, _, MAX>(deserializer).map(Self)
    }
}

impl<T: Form, const MAX: usize> Form for List<T, MAX> {
    type Value = Vec<T::Value>;

    fn value(self) -> Self::Value {
        self.0.into_iter().map(Form::value).collect()
    }
}

impl<const MAX: usize> Form for Text<MAX> {
    type Value = String;

    fn value(self) -> String {
        self.into_string()
    }
}

/// Something that may be `null`, or not be there.
#[derive(Deserialize)]
#[serde(transparent)]
pub(crate) struct Maybe<T>(pub(crate) Option<T>);

impl<T: Form> Form for Maybe<T> {
    type Value = Option<T::Value>;

    fn value(self) -> Self::Value {
        self.0.map(Form::value)
    }
}

/// Text of at most `MAX` bytes, read as a `T`.
pub(crate) struct Parsed<T, const MAX: usize>(T);

impl<'de, T, const MAX: usize> Deserialize<'de> for Parsed<T, MAX>
where
    T: FromStr,
    T::Err: fmt::Display,
{
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = Text::<MAX>::deserialize(deserializer)?;
        text.as_str().parse().map(Self).map_err(D::Error::custom)
    }
}

impl<T, const MAX: usize> Form for Parsed<T, MAX> {
    type Value = T;

    fn value(self) -> T {
        self.0
    }
}

/// Writes what [`Parsed`] reads.
pub(crate) fn text<T: fmt::Display, S: Serializer>(
    value: &T,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    serializer.collect_str(value)
}

/// A time in whole milliseconds.
#[derive(Deserialize)]
#[serde(transparent)]
pub(crate) struct Millis(u64);

impl Form for Millis {
    type Value = Duration;

    fn value(self) -> Duration {
        Duration::from_millis(self.0)
    }
}

/// Writes what [`Millis`] reads.
pub(crate) fn millis<S: Serializer>(time: &Duration, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_u64(u64::try_from(time.as_millis()).unwrap_or(u64::MAX))
}

/// A range, as its two ends.
#[derive(Deserialize)]
#[serde(transparent)]
pub(crate) struct Span((u64, u64));

impl Form for Span {
    type Value = Range<u64>;

    fn value(self) -> Range<u64> {
        self.0.0..self.0.1
    }
}

/// Writes what [`Span`] reads.
pub(crate) fn span<S: Serializer>(range: &Range<u64>, serializer: S) -> Result<S::Ok, S::Error> {
    serde::Serialize::serialize(&(range.start, range.end), serializer)
}

/// A lease: `owner/number.epoch` where people read, else 28 bytes.
pub(crate) struct LeaseForm(LeaseName);

impl Form for LeaseForm {
    type Value = LeaseName;

    fn value(self) -> LeaseName {
        self.0
    }
}

impl<'de> Deserialize<'de> for LeaseForm {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let lease = if deserializer.is_human_readable() {
            parse_lease(Text::<64>::deserialize(deserializer)?.as_str())
        } else {
            lease_of(&wire::bytes::<_, 28>(deserializer)?)
        };
        lease.map(Self).ok_or_else(|| D::Error::custom("not a lease's name"))
    }
}

/// Writes what [`LeaseForm`] reads.
pub(crate) fn lease<S: Serializer>(lease: &LeaseName, serializer: S) -> Result<S::Ok, S::Error> {
    if serializer.is_human_readable() {
        return serializer.collect_str(lease);
    }
    let mut bytes = [0; 28];
    bytes[..16].copy_from_slice(lease.owner.as_bytes());
    bytes[16..24].copy_from_slice(&lease.number.to_le_bytes());
    bytes[24..].copy_from_slice(&lease.epoch.to_le_bytes());
    serializer.serialize_bytes(&bytes)
}

fn lease_of(bytes: &[u8]) -> Option<LeaseName> {
    let (owner, rest) = bytes.split_first_chunk::<16>()?;
    let (number, epoch) = rest.split_first_chunk::<8>()?;
    Some(LeaseName {
        owner: Incarnation::from_bytes(*owner),
        number: u64::from_le_bytes(*number),
        epoch: u32::from_le_bytes(epoch.try_into().ok()?),
    })
}

fn parse_lease(text: &str) -> Option<LeaseName> {
    let (owner, rest) = text.split_once('/')?;
    let (number, epoch) = rest.split_once('.')?;
    let digits = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit());
    if owner.len() != 32 || !owner.is_ascii() || !digits(number) || !digits(epoch) {
        return None;
    }
    let mut bytes = [0; 16];
    for (i, byte) in bytes.iter_mut().enumerate() {
        let pair = &owner[2 * i..2 * i + 2];
        if !pair.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            return None;
        }
        *byte = u8::from_str_radix(pair, 16).ok()?;
    }
    Some(LeaseName {
        owner: Incarnation::from_bytes(bytes),
        number: number.parse().ok()?,
        epoch: epoch.parse().ok()?,
    })
}

/// Block ids, at most `MAX`: a list of numbers where people read, else four bytes each, little end first.
pub(crate) struct Ids<const MAX: usize>(Vec<u32>);

impl<const MAX: usize> Form for Ids<MAX> {
    type Value = Vec<u32>;

    fn value(self) -> Vec<u32> {
        self.0
    }
}

impl<'de, const MAX: usize> Deserialize<'de> for Ids<MAX> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        if deserializer.is_human_readable() {
            return wire::list::<_, _, MAX>(deserializer).map(Self);
        }
        deserializer.deserialize_bytes(IdBytes::<MAX>(PhantomData)).map(Self)
    }
}

struct IdBytes<const MAX: usize>(PhantomData<()>);

impl<const MAX: usize> Visitor<'_> for IdBytes<MAX> {
    type Value = Vec<u32>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "at most {MAX} block ids")
    }

    fn visit_bytes<E: serde::de::Error>(self, bytes: &[u8]) -> Result<Vec<u32>, E> {
        let (ids, rest) = bytes.as_chunks::<4>();
        if !rest.is_empty() {
            return Err(E::custom("the block ids end in the middle of one"));
        }
        if ids.len() > MAX {
            return Err(E::custom(format_args!("{} items; the limit is {MAX}", ids.len())));
        }
        Ok(ids.iter().map(|id| u32::from_le_bytes(*id)).collect())
    }
}

/// Writes what [`Ids`] reads.
pub(crate) fn ids<S: Serializer>(ids: &[u32], serializer: S) -> Result<S::Ok, S::Error> {
    if serializer.is_human_readable() {
        return serializer.collect_seq(ids);
    }
    let mut bytes = Vec::with_capacity(4 * ids.len());
    ids.iter().for_each(|id| bytes.extend_from_slice(&id.to_le_bytes()));
    serializer.serialize_bytes(&bytes)
}
