//! Reads fields of a `config.json` and says which one is wrong.

use serde_json::{Map, Value};

use crate::layout::Dtype;
use crate::layout::geometry::MAX_LAYERS;
use crate::{Error, Result};

/// The fields of the text model: of `text_config` where there is one, else of the whole file.
#[derive(Debug)]
pub(super) struct Fields<'a> {
    outer: &'a Map<String, Value>,
    text: &'a Map<String, Value>,
}

/// An error about a field, naming it.
pub(super) fn wrong(field: &str, what: impl std::fmt::Display) -> Error {
    Error::config("config.json", format!("{field} {what}"))
}

impl<'a> Fields<'a> {
    pub(super) fn new(config: &'a Value) -> Result<Self> {
        let Value::Object(outer) = config else {
            return Err(Error::config("config.json", "not an object"));
        };
        let text = match outer.get("text_config") {
            None | Some(Value::Null) => outer,
            Some(Value::Object(text)) => text,
            Some(other) => return Err(wrong("text_config", format!("is {}", brief(other)))),
        };
        Ok(Self { outer, text })
    }

    /// The `model_type` of the whole file.
    pub(super) fn family(&self) -> Result<&'a str> {
        match self.outer.get("model_type") {
            Some(Value::String(family)) => Ok(family),
            Some(other) => Err(wrong("model_type", format!("is {}, not a name", brief(other)))),
            None => Err(missing("model_type")),
        }
    }

    /// A field that is there and not null.
    fn get(&self, field: &str) -> Option<&'a Value> {
        self.text.get(field).filter(|value| !value.is_null())
    }

    /// Whether a field is there and is null.
    pub(super) fn is_null(&self, field: &str) -> bool {
        self.text.get(field).is_some_and(Value::is_null)
    }

    /// A count, at least 1.
    pub(super) fn count(&self, field: &str) -> Result<Option<u32>> {
        let Some(value) = self.get(field) else { return Ok(None) };
        let count = value.as_u64().and_then(|count| u32::try_from(count).ok());
        match count {
            Some(count) if count > 0 => Ok(Some(count)),
            _ => Err(wrong(field, format!("is {}, not a count from 1 to 2^32 - 1", brief(value)))),
        }
    }

    /// A count that must be there.
    pub(super) fn need(&self, field: &str) -> Result<u32> {
        self.count(field)?.ok_or_else(|| missing(field))
    }

    /// A count that has a default.
    pub(super) fn count_or(&self, field: &str, default: u32) -> Result<u32> {
        Ok(self.count(field)?.unwrap_or(default))
    }

    /// The number of layers, small enough to make that many.
    pub(super) fn layers(&self, default: Option<u32>) -> Result<u32> {
        let field = "num_hidden_layers";
        let layers = self.count(field)?.or(default).ok_or_else(|| missing(field))?;
        if layers as usize > MAX_LAYERS {
            return Err(wrong(field, format!("is {layers}; the limit is {MAX_LAYERS}")));
        }
        Ok(layers)
    }

    /// How many entries a list has; `None` where it is no list.
    pub(super) fn entries(&self, field: &str) -> Option<u32> {
        let list = self.get(field)?.as_array()?;
        u32::try_from(list.len()).ok()
    }

    /// A flag; false where it is not there.
    pub(super) fn flag(&self, field: &str) -> Result<bool> {
        match self.get(field) {
            None => Ok(false),
            Some(Value::Bool(flag)) => Ok(*flag),
            Some(other) => Err(wrong(field, format!("is {}, not true or false", brief(other)))),
        }
    }

    /// A piece of text.
    pub(super) fn text(&self, field: &str) -> Result<Option<&'a str>> {
        match self.get(field) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(other) => Err(wrong(field, format!("is {}, not text", brief(other)))),
        }
    }

    /// A list with one entry for each of `layers` layers; `None` where it is not there or empty.
    fn list(&self, field: &str, layers: u32) -> Result<Option<&'a [Value]>> {
        match self.get(field) {
            None => Ok(None),
            Some(Value::Array(list)) if list.is_empty() => Ok(None),
            Some(Value::Array(list)) if list.len() == layers as usize => Ok(Some(list)),
            Some(Value::Array(list)) => {
                Err(wrong(field, format!("has {} entries for {layers} layers", list.len())))
            }
            Some(other) => Err(wrong(field, format!("is {}, not a list", brief(other)))),
        }
    }

    /// One name for each layer.
    pub(super) fn names(&self, field: &str, layers: u32) -> Result<Option<Vec<&'a str>>> {
        let Some(list) = self.list(field, layers)? else { return Ok(None) };
        let names = list.iter().map(|entry| {
            entry
                .as_str()
                .ok_or_else(|| wrong(field, format!("holds {}, not a name", brief(entry))))
        });
        names.collect::<Result<_>>().map(Some)
    }

    /// One flag for each layer, written as 0 and 1.
    pub(super) fn flags(&self, field: &str, layers: u32) -> Result<Option<Vec<bool>>> {
        let Some(list) = self.list(field, layers)? else { return Ok(None) };
        let flags = list.iter().map(|entry| match (entry.as_u64(), entry.as_bool()) {
            (Some(0), _) | (_, Some(false)) => Ok(false),
            (Some(1), _) | (_, Some(true)) => Ok(true),
            _ => Err(wrong(field, format!("holds {}, not 0 or 1", brief(entry)))),
        });
        flags.collect::<Result<_>>().map(Some)
    }

    /// The dtype in a field of the text model.
    pub(super) fn dtype_of(&self, field: &str) -> Result<Option<Dtype>> {
        match self.text(field)? {
            None => Ok(None),
            Some(name) => name.parse().map(Some).map_err(|error: Error| {
                let known: Vec<_> = Dtype::ALL.iter().map(|dtype| dtype.as_str()).collect();
                wrong(field, format!("is {}, not a known dtype", quote(name)))
                    .with_remedy(format!("known are {}", known.join(", ")))
                    .with_source(error)
            }),
        }
    }

    /// The model's dtype.
    pub(super) fn dtype(&self) -> Result<Dtype> {
        let whole = Self { outer: self.outer, text: self.outer };
        for fields in [self, &whole] {
            for field in ["dtype", "torch_dtype"] {
                if let Some(dtype) = fields.dtype_of(field)? {
                    return Ok(dtype);
                }
            }
        }
        Ok(Dtype::Bf16)
    }
}

fn missing(field: &str) -> Error {
    wrong(field, "is missing").with_remedy("the cache's geometry cannot be told without it")
}

/// A value as it stands, cut short where it is long.
fn brief(value: &Value) -> String {
    cut(value.to_string())
}

/// A name in quotes, cut short where it is long.
pub(super) fn quote(name: &str) -> String {
    cut(format!("{name:?}"))
}

fn cut(text: String) -> String {
    match text.char_indices().nth(40) {
        None => text,
        Some((end, _)) => format!("{}...", &text[..end]),
    }
}
