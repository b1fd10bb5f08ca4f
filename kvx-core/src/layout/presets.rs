//! Geometries of well-known models.

use super::dtype::Dtype;
use super::geometry::ModelGeometry;
use crate::{Error, Result};

/// Makes a preset's geometry.
type Make = fn() -> Result<ModelGeometry>;

const TABLE: &[(&str, Make)] = &[
    ("llama-3.1-8b", || ModelGeometry::llama_like(32, 8, 128, Dtype::Bf16)),
    ("deepseek-v3", || ModelGeometry::mla_like(61, 576, Dtype::Bf16)),
];

const NAMES: [&str; TABLE.len()] = {
    let mut names = [""; TABLE.len()];
    let mut at = 0;
    while at < names.len() {
        names[at] = TABLE[at].0;
        at += 1;
    }
    names
};

impl ModelGeometry {
    /// The names of all presets.
    pub const PRESETS: &'static [&'static str] = &NAMES;

    /// The geometry of a well-known model, by its name.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Config`](crate::ErrorKind::Config), listing all names, when there is no preset of this one.
    pub fn preset(name: &str) -> Result<Self> {
        let Some((name, make)) = TABLE.iter().find(|(known, _)| *known == name) else {
            return Err(Error::config("preset", format!("no preset is called {name:?}"))
                .with_remedy(format!(
                    "use one of {}, or a config.json",
                    Self::PRESETS.join(", ")
                )));
        };
        make().map(|geometry| geometry.with_name(*name))
    }
}
