//! The key that all engines of a deployment share.

use std::path::PathBuf;

use kvx_connector::control::Key;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::error;

/// A secret that all engines of one deployment share: who has it may talk to them, nobody else. It is never printed.
#[pyclass(frozen, name = "Key", module = "kvx")]
pub(crate) struct PyKey {
    pub(crate) key: Key,
}

#[pymethods]
impl PyKey {
    /// A new key, from the operating system's random numbers.
    #[staticmethod]
    fn generate() -> PyResult<Self> {
        Key::generate().map(|key| Self { key }).map_err(error::raise)
    }

    /// A key of these 32 bytes. They should be random: a password is guessed.
    #[staticmethod]
    fn from_bytes(data: &[u8]) -> PyResult<Self> {
        let bytes = <[u8; 32]>::try_from(data).map_err(|_| {
            PyValueError::new_err(format!("a key has 32 bytes, not {}", data.len()))
        })?;
        Ok(Self { key: Key::from_bytes(bytes) })
    }

    /// The key that ``text`` holds, in the form of a key's file.
    #[staticmethod]
    fn from_text(text: &str) -> PyResult<Self> {
        Key::from_text(text).map(|key| Self { key }).map_err(error::raise)
    }

    /// Reads a key's file, which nobody but its owner may read or write; with ``group``, its group may read it, too.
    #[staticmethod]
    #[pyo3(signature = (path, *, group = false))]
    fn from_file(path: PathBuf, group: bool) -> PyResult<Self> {
        let read = if group { Key::from_file_of_group(path) } else { Key::from_file(path) };
        read.map(|key| Self { key }).map_err(error::raise)
    }

    /// Writes it into a new file that its owner alone may read.
    fn write_new(&self, path: PathBuf) -> PyResult<()> {
        self.key.write_new(path).map_err(error::raise)
    }

    #[expect(clippy::unused_self, reason = "what it would show is secret")]
    fn __repr__(&self) -> &'static str {
        "Key(..)"
    }
}
