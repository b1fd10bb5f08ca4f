//! Geometries from a Hugging Face `config.json`.

use serde_json::Value;

use super::geometry::{LayerKind, ModelGeometry};
use crate::{Error, Result};

mod attention;
mod fields;
mod mla;
mod state;

use fields::{Fields, quote};

/// Reads the layers of one family of models.
type Read = fn(&Fields<'_>) -> Result<Vec<LayerKind>>;

/// Values of `model_type` and how to read what belongs to them.
const FAMILIES: &[(&str, Read)] = &[
    ("deepseek_v2", mla::deepseek),
    ("deepseek_v3", mla::deepseek),
    ("deepseek_v32", mla::deepseek_sparse),
    ("gemma3", attention::gemma3),
    ("gemma3_text", attention::gemma3),
    ("gpt_oss", attention::gpt_oss),
    ("llama", attention::llama),
    ("llama4", attention::llama4),
    ("llama4_text", attention::llama4),
    ("mistral", attention::mistral),
    ("mixtral", attention::mistral),
    ("nemotron_h", state::nemotron_h),
    ("qwen2", attention::qwen),
    ("qwen2_moe", attention::qwen_moe),
    ("qwen3", attention::qwen3),
    ("qwen3_moe", attention::qwen_moe),
    ("qwen3_next", state::qwen3_next),
];

impl ModelGeometry {
    /// Reads the geometry of a model from the text of its Hugging Face `config.json`. The geometry's name is the
    /// `model_type`.
    ///
    /// It is the cache of the model as it stands in the file, without draft or multi-token-prediction layers and before
    /// an engine's choice of a dtype for the cache ([`with_dtype`](Self::with_dtype)). Element types come from `dtype`
    /// or `torch_dtype`, and are bf16 where there is neither. Fields that Hugging Face leaves out of a nested
    /// `text_config` where they have their default (Gemma 3, Llama 4) are taken to have it; of other models every field
    /// must be there. The recurrent state has the dtype `mamba_ssm_cache_dtype` or `mamba_ssm_dtype`; where the file has
    /// neither, it is f32 for Nemotron-H and the model's own for Qwen3-Next, as in vLLM. Keys of DeepSeek-V3.2's index
    /// are fp8 with one f32 scale for every 128 elements, as its reference implementation keeps them.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Config`](crate::ErrorKind::Config): the text is not JSON, `model_type` is missing or not a known one
    /// (all known ones are listed), a field is missing or makes no sense (it is named, with its value), or `layer_types` has
    /// another number of entries than there are layers.
    pub fn from_hf_config(json: &str) -> Result<Self> {
        let config: Value = serde_json::from_str(json).map_err(|source| {
            Error::config("config.json", format!("not JSON: {source}")).with_source(source)
        })?;
        let fields = Fields::new(&config)?;
        let family = fields.family()?;
        let Some((_, read)) = FAMILIES.iter().find(|(known, _)| *known == family) else {
            let known: Vec<_> = FAMILIES.iter().map(|(known, _)| *known).collect();
            return Err(Error::config(
                "config.json",
                format!("unknown model_type {}", quote(family)),
            )
            .with_remedy(format!("known are {}", known.join(", "))));
        };
        let layers = read(&fields)
            .and_then(|layers| {
                // Whether or not the family asks for it: a list for another number of layers is another model's.
                let count = u32::try_from(layers.len()).unwrap_or(u32::MAX);
                fields.names("layer_types", count)?;
                Ok(layers)
            })
            .map_err(|error| error.with_context("model_type", family))?;
        Self::new(family, layers)
    }
}

#[cfg(test)]
mod tests;
