//! Types of elements and reductions over them, with NCCL's numbers.

/// A type of element, as in `ncclDataType_t`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum DataType {
    /// Signed, 8 bits.
    Int8 = 0,
    /// Unsigned, 8 bits.
    Uint8 = 1,
    /// Signed, 32 bits.
    Int32 = 2,
    /// Unsigned, 32 bits.
    Uint32 = 3,
    /// Signed, 64 bits.
    Int64 = 4,
    /// Unsigned, 64 bits.
    Uint64 = 5,
    /// IEEE 754 binary16.
    Float16 = 6,
    /// IEEE 754 binary32.
    Float32 = 7,
    /// IEEE 754 binary64.
    Float64 = 8,
    /// The upper half of a binary32.
    Bfloat16 = 9,
    /// OCP FP8 E4M3: no infinity, largest number 448.
    Float8E4m3 = 10,
    /// OCP FP8 E5M2: largest number 57344.
    Float8E5m2 = 11,
}

impl DataType {
    /// Every type, in the order of its number.
    pub const ALL: [Self; 12] = [
        Self::Int8,
        Self::Uint8,
        Self::Int32,
        Self::Uint32,
        Self::Int64,
        Self::Uint64,
        Self::Float16,
        Self::Float32,
        Self::Float64,
        Self::Bfloat16,
        Self::Float8E4m3,
        Self::Float8E5m2,
    ];

    /// The type that has this number in `ncclDataType_t`.
    pub fn from_code(code: u8) -> Option<Self> {
        Self::ALL.get(usize::from(code)).copied()
    }

    /// Its number in `ncclDataType_t`.
    pub const fn code(self) -> u8 {
        self as u8
    }

    /// Bytes of one element.
    pub const fn bytes(self) -> usize {
        match self {
            Self::Int8 | Self::Uint8 | Self::Float8E4m3 | Self::Float8E5m2 => 1,
            Self::Float16 | Self::Bfloat16 => 2,
            Self::Int32 | Self::Uint32 | Self::Float32 => 4,
            Self::Int64 | Self::Uint64 | Self::Float64 => 8,
        }
    }
}

/// A reduction, as in `ncclRedOp_t`. An average reaches a network plugin as a sum.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Op {
    /// Sum.
    Sum = 0,
    /// Product.
    Prod = 1,
    /// Maximum.
    Max = 2,
    /// Minimum.
    Min = 3,
}

impl Op {
    /// Every reduction, in the order of its number.
    pub const ALL: [Self; 4] = [Self::Sum, Self::Prod, Self::Max, Self::Min];

    /// The reduction that has this number in `ncclRedOp_t`.
    pub fn from_code(code: u8) -> Option<Self> {
        Self::ALL.get(usize::from(code)).copied()
    }

    /// Its number in `ncclRedOp_t`.
    pub const fn code(self) -> u8 {
        self as u8
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn data_type_and_op_codes_are_nccls() {
        for (code, kind) in (0..).zip(DataType::ALL) {
            assert_eq!((kind.code(), DataType::from_code(code)), (code, Some(kind)));
        }
        for (code, op) in (0..).zip(Op::ALL) {
            assert_eq!((op.code(), Op::from_code(code)), (code, Some(op)));
        }
        assert_eq!((DataType::from_code(12), Op::from_code(4)), (None, None));
    }
}
