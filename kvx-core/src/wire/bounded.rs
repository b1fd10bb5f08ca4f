//! Text, lists, maps and bytes that refuse to grow beyond a limit, for use with `#[serde(deserialize_with = ...)]`.

use std::collections::BTreeMap;
use std::fmt;
use std::marker::PhantomData;

use serde::de::{Error as _, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::{Error, Result};

/// Text of at most `MAX` bytes, without control characters, so that it may be printed and logged as it is.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Default)]
#[serde(transparent)]
pub struct Text<const MAX: usize>(String);

impl<const MAX: usize> Text<MAX> {
    /// This text.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Misuse`](crate::ErrorKind::Misuse): too long, or with a control character.
    pub fn new(text: impl Into<String>) -> Result<Self> {
        let text = text.into();
        match refusal(&text, MAX) {
            None => Ok(Self(text)),
            Some(reason) => Err(Error::misuse("text", reason)),
        }
    }

    /// The text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The text.
    #[must_use]
    pub fn into_string(self) -> String {
        self.0
    }
}

impl<const MAX: usize> fmt::Display for Text<MAX> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl<'de, const MAX: usize> Deserialize<'de> for Text<MAX> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Bounded<const MAX: usize>;

        impl<const MAX: usize> Visitor<'_> for Bounded<MAX> {
            type Value = Text<MAX>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "text of at most {MAX} bytes")
            }

            fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<Self::Value, E> {
                match refusal(text, MAX) {
                    None => Ok(Text(text.to_owned())),
                    Some(reason) => Err(E::custom(reason)),
                }
            }
        }

        deserializer.deserialize_str(Bounded)
    }
}

fn refusal(text: &str, max: usize) -> Option<String> {
    if text.len() > max {
        return Some(format!("text of {} bytes; the limit is {max}", text.len()));
    }
    text.chars()
        .find(|char| char.is_control())
        .map(|char| format!("text with the control character {:?}", char))
}

/// Reads a list of at most `MAX` items.
///
/// # Errors
///
/// More are announced, or more are there, or one of them cannot be read.
pub fn list<'de, D, T, const MAX: usize>(deserializer: D) -> Result<Vec<T>, D::Error>
where
    D: Deserializer<'de>,
    T: Deserialize<'de>,
{
    struct Bounded<T, const MAX: usize>(PhantomData<T>);

    impl<'de, T: Deserialize<'de>, const MAX: usize> Visitor<'de> for Bounded<T, MAX> {
        type Value = Vec<T>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            write!(f, "a list of at most {MAX} items")
        }

        fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Self::Value, A::Error> {
            refuse_count(items.size_hint(), MAX)?;
            let mut list = Vec::new();
            while let Some(item) = items.next_element()? {
                refuse_count(Some(list.len() + 1), MAX)?;
                list.push(item);
            }
            Ok(list)
        }
    }

    deserializer.deserialize_seq(Bounded::<T, MAX>(PhantomData))
}

/// Reads a map of at most `MAX` entries, no two of the same key.
///
/// # Errors
///
/// More are announced, or more are there, or a key is there twice, or one of them cannot be read.
pub fn map<'de, D, K, V, const MAX: usize>(deserializer: D) -> Result<BTreeMap<K, V>, D::Error>
where
    D: Deserializer<'de>,
    K: Deserialize<'de> + Ord + fmt::Display,
    V: Deserialize<'de>,
{
    struct Bounded<K, V, const MAX: usize>(PhantomData<(K, V)>);

    impl<'de, K, V, const MAX: usize> Visitor<'de> for Bounded<K, V, MAX>
    where
        K: Deserialize<'de> + Ord + fmt::Display,
        V: Deserialize<'de>,
    {
        type Value = BTreeMap<K, V>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            write!(f, "a map of at most {MAX} entries")
        }

        fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Self::Value, A::Error> {
            refuse_count(entries.size_hint(), MAX)?;
            let mut map = BTreeMap::new();
            while let Some(key) = entries.next_key::<K>()? {
                refuse_count(Some(map.len() + 1), MAX)?;
                if map.contains_key(&key) {
                    return Err(A::Error::custom(format_args!("{key} is there twice")));
                }
                map.insert(key, entries.next_value()?);
            }
            Ok(map)
        }
    }

    deserializer.deserialize_map(Bounded::<K, V, MAX>(PhantomData))
}

/// Reads at most `MAX` bytes.
///
/// # Errors
///
/// There are more, or it is something else.
pub fn bytes<'de, D, const MAX: usize>(deserializer: D) -> Result<Vec<u8>, D::Error>
where
    D: Deserializer<'de>,
{
    struct Bounded<const MAX: usize>;

    impl<'de, const MAX: usize> Visitor<'de> for Bounded<MAX> {
        type Value = Vec<u8>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            write!(f, "at most {MAX} bytes")
        }

        fn visit_bytes<E: serde::de::Error>(self, bytes: &[u8]) -> Result<Self::Value, E> {
            refuse_count(Some(bytes.len()), MAX)?;
            Ok(bytes.to_vec())
        }

        // Formats without bytes of their own, such as JSON, have a list of numbers.
        fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Self::Value, A::Error> {
            refuse_count(items.size_hint(), MAX)?;
            let mut bytes = Vec::new();
            while let Some(byte) = items.next_element()? {
                refuse_count(Some(bytes.len() + 1), MAX)?;
                bytes.push(byte);
            }
            Ok(bytes)
        }
    }

    deserializer.deserialize_bytes(Bounded::<MAX>)
}

/// Writes bytes as such, not as a list of numbers.
///
/// # Errors
///
/// Those of the serializer.
pub fn serialize_bytes<B, S>(bytes: &B, serializer: S) -> Result<S::Ok, S::Error>
where
    B: AsRef<[u8]> + ?Sized,
    S: Serializer,
{
    serializer.serialize_bytes(bytes.as_ref())
}

fn refuse_count<E: serde::de::Error>(count: Option<usize>, max: usize) -> Result<(), E> {
    match count {
        Some(count) if count > max => {
            Err(E::custom(format_args!("{count} items; the limit is {max}")))
        }
        _ => Ok(()),
    }
}
