//! Element types of cache tensors.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::Error;

/// The type of one element of a cache tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Dtype {
    /// IEEE 754 double precision, 8 bytes.
    F64,
    /// IEEE 754 single precision, 4 bytes.
    F32,
    /// IEEE 754 half precision, 2 bytes.
    F16,
    /// Brain float, 2 bytes.
    Bf16,
    /// 8-bit float with 4 exponent and 3 mantissa bits.
    Fp8E4m3,
    /// 8-bit float with 5 exponent and 2 mantissa bits.
    Fp8E5m2,
    /// Signed 8-bit integer.
    I8,
    /// Unsigned 8-bit integer, also used for packed formats whose bytes are moved as they are.
    U8,
}

impl Dtype {
    /// All of them.
    pub const ALL: [Self; 8] = [
        Self::F64,
        Self::F32,
        Self::F16,
        Self::Bf16,
        Self::Fp8E4m3,
        Self::Fp8E5m2,
        Self::I8,
        Self::U8,
    ];

    /// Size of one element, in bytes.
    #[must_use]
    pub const fn bytes(self) -> u64 {
        match self {
            Self::F64 => 8,
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
            Self::Fp8E4m3 | Self::Fp8E5m2 | Self::I8 | Self::U8 => 1,
        }
    }

    /// Its name, as it is read and printed.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::F64 => "f64",
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
            Self::Fp8E4m3 => "fp8_e4m3",
            Self::Fp8E5m2 => "fp8_e5m2",
            Self::I8 => "i8",
            Self::U8 => "u8",
        }
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// Reads our own names and those of PyTorch and Hugging Face (`bfloat16`, `torch.float16`, `fp8`, ...).
impl FromStr for Dtype {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let name = text.strip_prefix("torch.").unwrap_or(text);
        Ok(match name {
            "f64" | "float64" | "double" => Self::F64,
            "f32" | "float32" | "float" => Self::F32,
            "f16" | "float16" | "half" => Self::F16,
            "bf16" | "bfloat16" => Self::Bf16,
            "fp8" | "fp8_e4m3" | "fp8_e4m3fn" | "float8_e4m3fn" => Self::Fp8E4m3,
            "fp8_e5m2" | "float8_e5m2" => Self::Fp8E5m2,
            "i8" | "int8" => Self::I8,
            "u8" | "uint8" => Self::U8,
            _ => {
                let known: Vec<_> = Self::ALL.iter().map(|dtype| dtype.as_str()).collect();
                return Err(Error::config("dtype", format!("unknown dtype {text:?}"))
                    .with_remedy(format!("use one of {}", known.join(", "))));
            }
        })
    }
}
