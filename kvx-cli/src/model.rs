//! Where a model's geometry comes from: a preset or a `config.json`.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use kvx_core::layout::{Dtype, ModelGeometry};
use kvx_core::wire::printable;
use kvx_core::{Error, Result};

/// Most bytes of a `config.json`.
const MAX_BYTES: u64 = 16 << 20;

/// The geometry of `model`: the name of a preset, or the path of a Hugging Face `config.json`; with `dtype` in place of the
/// cache's element type, where that is given.
///
/// # Errors
///
/// [`ErrorKind::Config`](kvx_core::ErrorKind::Config) when there is neither such a preset nor such a file, or when the file
/// does not tell what is needed.
pub(crate) fn load(model: &str, dtype: Option<Dtype>) -> Result<ModelGeometry> {
    let path = Path::new(model);
    let geometry = if ModelGeometry::PRESETS.contains(&model) {
        ModelGeometry::preset(model)?
    } else if path.exists() {
        let geometry = ModelGeometry::from_hf_config(&read(path)?)
            .map_err(|error| error.with_context("file", path.display()))?;
        let name = path.parent().and_then(Path::file_name).map(|name| name.to_string_lossy());
        match name {
            // A checkpoint's directory has the model's name.
            Some(name) if path.file_name().is_some_and(|file| file == "config.json") => {
                geometry.with_name(printable(&name))
            }
            _ => geometry,
        }
    } else {
        return Err(Error::config("--model", format!("{model:?} is neither a preset nor a file"))
            .with_remedy(format!(
                "give the path of a config.json, or use one of {}",
                ModelGeometry::PRESETS.join(", ")
            )));
    };
    Ok(match dtype {
        Some(dtype) => geometry.with_dtype(dtype),
        None => geometry,
    })
}

fn read(path: &Path) -> Result<String> {
    let refuse = |source| {
        Error::config("--model", format!("{} cannot be read", path.display())).with_source(source)
    };
    let mut text = String::new();
    let file = File::open(path).map_err(refuse)?;
    let read = file.take(MAX_BYTES + 1).read_to_string(&mut text).map_err(refuse)?;
    if read as u64 > MAX_BYTES {
        return Err(Error::config("--model", format!("{} is too large", path.display()))
            .with_context("limit", MAX_BYTES)
            .with_remedy("give a model's config.json"));
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn presets_are_known_by_name_and_anything_else_is_refused_by_name() {
        for name in ModelGeometry::PRESETS {
            assert_eq!(load(name, None).unwrap().name(), *name);
        }
        let f16 = load("llama-3.1-8b", Some(Dtype::F16)).unwrap();
        assert_eq!(f16.dtype(), Some(Dtype::F16));
        let error = load("llama-5", None).unwrap_err().to_string();
        assert!(error.contains("\"llama-5\"") && error.contains("gemma-3-4b"), "{error}");
        // A directory is no file.
        let error = load(env!("CARGO_MANIFEST_DIR"), None).unwrap_err().to_string();
        assert!(error.contains("cannot be read"), "{error}");
    }

    #[test]
    fn a_file_that_is_no_configuration_is_named() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml");
        let error = load(path, None).unwrap_err().to_string();
        assert!(error.contains("not JSON") && error.contains("Cargo.toml"), "{error}");
    }
}
