//! Options of a backend: a map of text, from a program, a file or the environment.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// Options by name. What they mean is the backend's business; what it does not know, it refuses.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct BackendConfig {
    options: BTreeMap<String, String>,
    #[serde(skip)]
    origin: Option<&'static str>,
}

/// Equal are those that say the same, wherever they are from.
impl PartialEq for BackendConfig {
    fn eq(&self, other: &Self) -> bool {
        self.options == other.options
    }
}

impl Eq for BackendConfig {}

impl BackendConfig {
    /// No options.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets an option.
    #[must_use]
    pub fn with(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        self.options.insert(name.into(), value.into());
        self
    }

    /// Says where they are from, for messages: a variable of the environment, or an option of a command.
    #[must_use]
    pub const fn with_origin(mut self, origin: &'static str) -> Self {
        self.origin = Some(origin);
        self
    }

    /// Where they are from, where somebody has said so.
    #[must_use]
    pub const fn origin(&self) -> Option<&'static str> {
        self.origin
    }

    /// Reads `name=value,name=value`, of which there must be one at least, from this origin.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Config`](crate::ErrorKind::Config), naming the origin: an option is empty, has no name or no value, or is given twice.
    pub fn read_from(origin: &'static str, text: &str) -> Result<Self> {
        let read = if text.trim().is_empty() { Err(empty()) } else { text.parse::<Self>() };
        read.map(|options| options.with_origin(origin))
            .map_err(|error| error.with_context("options_from", origin))
    }

    /// The text of an option, if it is set.
    #[must_use]
    pub fn text(&self, name: &str) -> Option<&str> {
        self.options.get(name).map(String::as_str)
    }

    /// The value of an option, if it is set.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Config`](crate::ErrorKind::Config), naming the option and its text, when it cannot be read as a `T`.
    pub fn value<T>(&self, name: &str) -> Result<Option<T>>
    where
        T: FromStr,
        T::Err: fmt::Display,
    {
        let Some(text) = self.text(name) else { return Ok(None) };
        text.parse().map(Some).map_err(|error: T::Err| {
            let error = error.to_string();
            let why = match error.as_str() {
                // What Rust says of numbers, to people who write no Rust.
                "invalid digit found in string" | "cannot parse integer from empty string" => {
                    "this is no whole number, 0 or more"
                }
                "number too large to fit in target type" => "this number is too large",
                _ => &error,
            };
            Error::config("backend_config", format!("option {name}={text:?}: {why}"))
        })
    }

    /// All options, sorted by name.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &str)> {
        self.options.iter().map(|(name, value)| (name.as_str(), value.as_str()))
    }

    /// Refuses options that are not among `known`.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Config`](crate::ErrorKind::Config), naming the option and those that there are.
    pub fn refuse_unknown(&self, known: &[&str]) -> Result<()> {
        match self.options.keys().find(|name| !known.contains(&name.as_str())) {
            None => Ok(()),
            Some(name) => {
                let known = if known.is_empty() { "none".into() } else { known.join(", ") };
                Err(Error::config("backend_config", format!("unknown option {name:?}"))
                    .with_context("options", known))
            }
        }
    }
}

impl<N: Into<String>, V: Into<String>> FromIterator<(N, V)> for BackendConfig {
    fn from_iter<I: IntoIterator<Item = (N, V)>>(pairs: I) -> Self {
        let options = pairs.into_iter().map(|(name, value)| (name.into(), value.into())).collect();
        Self { options, origin: None }
    }
}

/// Commas are between options.
const SEVERAL: &str = "an option with several values has plus signs between them: name=a+b";

fn empty() -> Error {
    Error::config("backend_config", "an option is empty")
        .with_remedy("write name=value,name=value, and no comma before the first or after the last")
}

/// Reads `name=value,name=value`, each name once; no options where there is no text.
impl FromStr for BackendConfig {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let mut options = BTreeMap::new();
        if text.trim().is_empty() {
            return Ok(Self::new());
        }
        for part in text.split(',').map(str::trim) {
            if part.is_empty() {
                return Err(empty());
            }
            let (name, value) = part.split_once('=').ok_or_else(|| {
                Error::config("backend_config", format!("{part:?} is not name=value"))
                    .with_remedy(SEVERAL)
            })?;
            let (name, value) = (name.trim_end(), value.trim_start());
            if name.is_empty() {
                return Err(Error::config("backend_config", format!("{part:?} has no name"))
                    .with_remedy("write name=value"));
            }
            if let Some(before) = options.insert(name.to_owned(), value.to_owned()) {
                let twice = format!("option {name:?} is given twice");
                return Err(Error::config("backend_config", twice)
                    .with_context("first", before)
                    .with_context("then", value)
                    .with_remedy(format!("leave one of them out; {SEVERAL}")));
            }
        }
        Ok(Self { options, origin: None })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_are_read_and_refused_by_name() {
        let config: BackendConfig = "seed=7, preset=rc".parse().unwrap();
        assert_eq!(config.value::<u64>("seed").unwrap(), Some(7));
        assert_eq!(config.value::<u64>("other").unwrap(), None);
        assert!(config.value::<u64>("preset").unwrap_err().to_string().contains("preset=\"rc\""));
        config.refuse_unknown(&["seed", "preset"]).unwrap();
        let error = config.refuse_unknown(&["seed"]).unwrap_err().to_string();
        assert!(error.contains("\"preset\"") && error.contains("options=seed"), "{error}");
        assert!("seed".parse::<BackendConfig>().is_err());
        assert_eq!("seed = 7".parse::<BackendConfig>().unwrap().text("seed"), Some("7"));
        assert!("=7".parse::<BackendConfig>().unwrap_err().to_string().contains("no name"));
        assert_eq!(" ".parse::<BackendConfig>().unwrap(), BackendConfig::new());
        for twice in ["seed=7,seed=8", "seed=7,preset=rc, seed=7"] {
            let error = twice.parse::<BackendConfig>().unwrap_err().to_string();
            assert!(
                error.contains("\"seed\" is given twice") && error.contains("first=7"),
                "{error}"
            );
        }
    }

    proptest::proptest! {
        /// A comma without an option beside it is refused wherever it is, and nothing else changes what is read.
        #[test]
        fn no_option_is_empty(
            names in proptest::collection::btree_set("[a-z]{1,4}", 1..4),
            at in proptest::prelude::any::<proptest::sample::Index>(),
            blanks in " {0,2}",
        ) {
            let parts: Vec<String> = names.iter().map(|name| format!("{name}=1")).collect();
            let read = BackendConfig::read_from("HERE", &parts.join(",")).unwrap();
            proptest::prop_assert_eq!(read.iter().map(|(name, _)| name.to_owned()).collect::<Vec<_>>(), names.into_iter().collect::<Vec<_>>());
            proptest::prop_assert_eq!(read.origin(), Some("HERE"));
            let mut parts = parts;
            let at = at.index(parts.len() + 1);
            parts.insert(at, blanks.clone());
            for text in [parts.join(","), blanks] {
                let error = BackendConfig::read_from("HERE", &text).unwrap_err();
                proptest::prop_assert!(error.message() == "an option is empty" && error.remedy().is_some(), "{}", error);
                proptest::prop_assert!(error.to_string().contains("options_from=HERE"), "{}", error);
            }
        }
    }
}
