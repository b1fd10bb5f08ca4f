//! Options of a backend: a map of text, from a program, a file or the environment.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// Options by name. What they mean is the backend's business; what it does not know, it refuses.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct BackendConfig {
    options: BTreeMap<String, String>,
}

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
        text.parse().map(Some).map_err(|error| {
            Error::config("backend_config", format!("option {name}={text:?}: {error}"))
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
        Self { options: pairs.into_iter().map(|(n, v)| (n.into(), v.into())).collect() }
    }
}

/// Commas are between options.
const SEVERAL: &str = "an option with several values has plus signs between them: name=a+b";

/// Reads `name=value,name=value`, each name once.
impl FromStr for BackendConfig {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let mut options = BTreeMap::new();
        for part in text.split(',').map(str::trim).filter(|part| !part.is_empty()) {
            let (name, value) = part.split_once('=').ok_or_else(|| {
                Error::config("backend_config", format!("{part:?} is not name=value"))
                    .with_remedy(SEVERAL)
            })?;
            if let Some(before) = options.insert(name.to_owned(), value.to_owned()) {
                let twice = format!("option {name:?} is given twice");
                return Err(Error::config("backend_config", twice)
                    .with_context("first", before)
                    .with_context("then", value)
                    .with_remedy(format!("leave one of them out; {SEVERAL}")));
            }
        }
        Ok(Self { options })
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
        for twice in ["seed=7,seed=8", "seed=7,preset=rc, seed=7"] {
            let error = twice.parse::<BackendConfig>().unwrap_err().to_string();
            assert!(
                error.contains("\"seed\" is given twice") && error.contains("first=7"),
                "{error}"
            );
        }
    }
}
